"""Let each model answer the prompt in a process of its own; its failure is its answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import StageError, ValidationError
from slipway.files.regular_file import read_regular
from slipway.model.families import DECODER, ENCODER_DECODER, Family
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway.texts import shortened
from slipway.validation.inputs import NOT_OUTPUTS, output_of
from slipway.validation.questions import BASE, FINE_TUNED, MOST_CHARACTERS, AnswerReport, ModelAnswer
from slipway_validate.folders import find_refusal, runtime_for
from slipway_validate.preparation import decoder, open_models, tokenizer_folder
from slipway_validate.protocol import process
from slipway_validate.protocol.inputs import (
    ANSWERED_FILE,
    INPUTS_FILE,
    Answered,
    EncodedInputs,
    PromptAnswer,
    PromptSpec,
)
from slipway_validate.protocol.messages import RunResult, RunSpec, Spec
from slipway_validate.questions.params import AnswerParams
from slipway_validate.reference.running import RUNTIME

ASKED = (DECODER, ENCODER_DECODER)
"""Families that read a text and write one."""
_LARGEST = 16 << 20
_REMEDY = "shorten the prompt, ask for fewer tokens, or ask without the chat template"


def answer_prompt(inputs: Mapping[str, Path], params: AnswerParams, ctx: Context) -> Path:
    """Let the models answer, and return the folder with their answers.

    Raises:
        ValidationError: As :func:`slipway_validate.questions.stage.run`.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    work = ctx.workdir / "runs"
    work.mkdir()
    try:
        report = _Questioning(inputs, params, ctx, work).report()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    folder = ctx.workdir / "answers"
    folder.mkdir()
    report.write(folder)
    ctx.record(answered=[each.name for each in report.answers if each.status == "done"])
    return folder


@dataclass(frozen=True, slots=True)
class _Asked:
    """One process: the names under which it answers, and what it runs, or why it runs nothing."""

    names: tuple[str, ...]
    spec: RunSpec
    refusal: RunResult | None = None


class _Questioning:
    """One prompt to several models.

    Args:
        inputs: Inputs of the stage.
        params: Its parameters.
        ctx: Its context.
        work: Folder of the processes.
    """

    def __init__(self, inputs: Mapping[str, Path], params: AnswerParams, ctx: Context, work: Path) -> None:
        self._inputs, self._params, self._ctx, self._work = inputs, params, ctx, work
        self._samples = work / "samples"
        _, self._model = open_models(inputs, work)
        self._family = _asked_family(self._model)

    def report(self) -> AnswerReport:
        """Return all answers."""
        asked = [*self._references(), *map(self._output, self._outputs())]
        if not asked:
            raise ValidationError("no model is asked", reason="VALIDATION_IMPOSSIBLE", remedy="choose at least one")
        encoded = self._encode()
        ids = encoded.inputs[0].ids
        decode = decoder(self._samples)
        return AnswerReport(
            prompt_tokens=len(ids),
            read=shortened(decode(ids), MOST_CHARACTERS),
            reference=FINE_TUNED if "adapter" in self._inputs else BASE,
            answers=tuple(answer for number, each in enumerate(asked) for answer in self._ask(each, number, decode)),
        )

    def _references(self) -> list[_Asked]:
        """Return base and base + adapter, which one process answers for."""
        adapter = self._inputs.get("adapter")
        wanted = [name for name in (BASE, FINE_TUNED) if name in self._params.models and (adapter or name == BASE)]
        if not wanted:
            return []
        used = adapter.absolute() if adapter is not None and FINE_TUNED in wanted else None
        spec = self._spec(RUNTIME, self._inputs["base"], wanted)
        return [_Asked(tuple(wanted), spec.model_copy(update={"adapter": used}))]

    def _outputs(self) -> Sequence[str]:
        return sorted(map(output_of, set(self._inputs) - set(NOT_OUTPUTS)))

    def _output(self, name: str) -> _Asked:
        folder = self._inputs.get(f"output.{name}", self._inputs.get(name))
        assert folder is not None
        runtime = runtime_for(name, folder)
        spec = self._spec(runtime.load if runtime else "", folder, [name])
        base = self._inputs["base"].absolute() if runtime is not None and runtime.on_base else None
        refusal = find_refusal(name, folder, runtime, self._family)
        return _Asked((name,), spec.model_copy(update={"base": base}), refusal)

    def _spec(self, runtime: str, model: Path, names: Sequence[str]) -> RunSpec:
        return RunSpec(
            runtime=runtime,
            model=model.absolute(),
            family=self._family.name,
            samples=self._samples.absolute(),
            threads=self._ctx.threads,
            asks=tuple(names),
        )

    def _encode(self) -> EncodedInputs:
        """Turn the prompt into tokens, by the tokenizer of the training."""
        params = self._params
        spec = PromptSpec(
            tokenizer=tokenizer_folder(self._inputs, self._model).absolute(),
            model=self._model.path.absolute(),
            family=self._family.name,
            prompt=params.prompt,
            chat=params.chat,
            most=params.max_new_tokens,
            samples=self._samples.absolute(),
        )
        result = self._run(Spec(prompt=spec), self._work / "prompt", "prompt")
        if result.reason == "DISK_FULL":
            raise StageError(f"no space left for the prompt: {result.message}", reason="DISK_FULL")
        if result.status != "done":
            raise ValidationError(result.message, reason=result.reason or "VALIDATION_IMPOSSIBLE", remedy=_REMEDY)
        data = read_regular(self._samples / INPUTS_FILE, largest=_LARGEST)
        return EncodedInputs.model_validate_json(data)

    def _ask(self, asked: _Asked, number: int, decode: Callable[[Sequence[int]], str]) -> list[ModelAnswer]:
        """Return the answers of one process."""
        folder = self._work / str(number)
        result = asked.refusal or self._run(Spec(run=asked.spec), folder, " and ".join(asked.names))
        if result.status != "done":
            return [_unanswered(name, result) for name in asked.names]
        answered = Answered.model_validate_json(read_regular(folder / ANSWERED_FILE, largest=_LARGEST)).answers
        return [_answered(name, answered[name], result, decode) for name in asked.names]

    def _run(self, spec: Spec, folder: Path, label: str) -> RunResult:
        self._ctx.progress(label, done=0, unit="tokens")
        return process.run(spec, folder, self._ctx, label=label, timeout_seconds=self._params.timeout_seconds)


def _asked_family(model: ModelFolder) -> Family:
    family = model.family
    if family in ASKED:
        return family
    what = f"a {family.name}" if family is not None else f"{model.config.description}, whose family is unknown,"
    raise ValidationError(
        f"{what} cannot be asked: it reads no text, or writes none",
        reason="FAMILY_UNSUPPORTED",
        remedy=f"ask a {' or an '.join(each.name for each in ASKED)}",
    )


def _unanswered(name: str, result: RunResult) -> ModelAnswer:
    return ModelAnswer(name=name, status=result.status, reason=result.reason, message=result.message)


def _answered(
    name: str, answer: PromptAnswer, result: RunResult, decode: Callable[[Sequence[int]], str]
) -> ModelAnswer:
    later = answer.seconds - answer.first_seconds
    engine = result.engine
    return ModelAnswer(
        name=name,
        text=shortened(decode(answer.tokens), MOST_CHARACTERS),
        tokens=answer.tokens,
        ended=answer.ended,
        first_seconds=answer.first_seconds,
        tokens_per_second=answer.steps / later if answer.steps and later > 0 else None,
        load_seconds=result.load_seconds,
        runtime=engine.runtime if engine else "",
        device=result.device,
        computed=engine.compute_dtype if engine else "",
    )
