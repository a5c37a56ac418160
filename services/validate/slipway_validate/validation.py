"""Run one validation from inputs to report: text, reference, one output after the other, verdict."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slipway.errors import ModelExportError, ValidationError
from slipway.models.base_format import read_config
from slipway.models.families import described, family_of
from slipway.models.model_files import CONFIG, copy_companions
from slipway.models.trained.trained_model import trained_model
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, OutputValidation, Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine, Speed
from slipway_validate.answers.records import FORMS, TEST_INPUTS, test_inputs
from slipway_validate.continuing import long_spec
from slipway_validate.folders import runtime_for, why_not_run
from slipway_validate.judging.answers import Scorer
from slipway_validate.judging.evaluate import MERGED, Evaluator, begin_result, result_not_run
from slipway_validate.judging.limits import LIMITS, limits_by_level
from slipway_validate.judging.measures import distance_of
from slipway_validate.judging.reference_run import ReferenceRun
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import Prepared, decoder, prepare, require_success
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import INPUTS_FILE, EncodedInputs, LongSpec, RunResult, RunSpec, Spec
from slipway_validate.reference import describe, run_reference
from slipway_validate.stopwatch import NO_ROOM, Stopwatch

NOT_OUTPUTS = ("adapter", "base", "heldout", TEST_INPUTS)
OUT_OF_MEMORY = ("STAGE_KILLED", "OUT_OF_MEMORY")
"""Failures of an output that the waiting reference may have caused: the output is run again without it."""


def validate(inputs: Mapping[str, Path], params: ValidateParams, ctx: Context) -> Path:
    """Validate the outputs and write the report; return its folder.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: see :func:`slipway_validate.stage.run`.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    outputs = _outputs(inputs, params)
    work = ctx.workdir / "runs"
    work.mkdir()
    try:
        report = _validated(inputs, outputs, params, ctx, work=work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    folder = ctx.workdir / "validation"
    folder.mkdir()
    report.write(folder)
    _record(report, ctx)
    return folder


def _outputs(inputs: Mapping[str, Path], params: ValidateParams) -> list[str]:
    """Return the names of the outputs: the merged model first, because others are compared with it; then by name."""
    unknown = sorted(set(params.limits) - set(LIMITS))
    if unknown:
        message, remedy = f"limits are given for unknown levels {unknown}", f"levels are {', '.join(LIMITS)}"
        raise ValidationError(message, reason="VALIDATION_IMPOSSIBLE", remedy=remedy)
    outputs = sorted(set(inputs) - set(NOT_OUTPUTS), key=lambda name: (name != MERGED, name))
    if not outputs:
        remedy = f"give at least one output by its format's name, for example {MERGED}"
        raise ValidationError("there is no output to validate", reason="VALIDATION_IMPOSSIBLE", remedy=remedy)
    return outputs


def _validated(
    inputs: Mapping[str, Path], outputs: list[str], params: ValidateParams, ctx: Context, *, work: Path
) -> ValidationReport:
    begin = time.monotonic()
    settings, config = _settings(inputs, work)
    family = family_of(config)
    if family is None:
        return _not_run(inputs, outputs, params, what=described(config))
    prepared = prepare({**inputs, "base": settings}, family, params, ctx, work=work)
    reference = waiting = None
    with ExitStack() as running:
        if params.compare_outputs:
            found = run_reference(inputs, prepared, params, ctx, folder=work / "reference")
            reference, waiting = running.enter_context(found)
        evaluator = Evaluator(
            reference,
            family,
            limits_by_level(params.limits),
            decode=decoder(prepared.tokenizer),
            scorer=_scorer({**inputs, "base": settings}, prepared, params, ctx),
        )
        stopwatch = Stopwatch(waiting, params, ctx)
        long = long_spec(prepared, settings, params, reference=reference.result) if reference else None
        one = _OneOutput(prepared, params, ctx, evaluator=evaluator, stopwatch=stopwatch, long=long)
        results = [
            one.validate(
                name, inputs[name], work / "outputs" / name, label=f"output {number} of {len(outputs)}: {name}"
            )
            for number, name in enumerate(outputs, 1)
        ]
        of_reference = describe(reference, stopwatch.reference_speed())
    if reference is not None:
        _warn_of_weak_effect(reference, ctx)
    return ValidationReport(
        reference=of_reference,
        inputs=prepared.described(params, vocabulary=reference.result.vocabulary if reference else 0),
        outputs=tuple(sorted(results, key=lambda result: result.name)),
        warnings=tuple(ctx.facts.get("warnings", ())),
        seconds=time.monotonic() - begin,
    )


def _scorer(inputs: Mapping[str, Path], prepared: Prepared, params: ValidateParams, ctx: Context) -> Scorer | None:
    """Return what scores the answers to test inputs; None if there are none."""
    family, encoded = prepared.family, prepared.folder / INPUTS_FILE
    if (TEST_INPUTS in inputs or params.test_inputs) and family.name not in FORMS:
        ctx.warn(f"the test inputs were not answered: a {family.name} answers none")
    if not encoded.is_file():
        return None
    readable = (prepared.tokenizer / "tokenizer.json").is_file()
    return Scorer(
        records=test_inputs(inputs, family, params),
        encoded=EncodedInputs.model_validate_json(encoded.read_bytes()),
        family=family,
        config=read_config(inputs["base"]),
        decode=decoder(prepared.tokenizer) if readable else None,
    )


def _settings(inputs: Mapping[str, Path], work: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder with configuration and tokenizer of what the adapter was trained on, and that configuration.

    It is the base's folder unless the adapter brings a head that makes it a model of another class.
    """
    base = inputs["base"]
    try:
        trained = trained_model(base, inputs["adapter"]) if "adapter" in inputs else None
        config = dict(trained.config) if trained else read_config(base)
    except ModelExportError as error:
        remedy = error.remedy or "give the folder of a whole model"
        raise ValidationError(
            f"the base model cannot be used: {error.message}", reason="VALIDATION_IMPOSSIBLE", remedy=remedy
        ) from error
    if trained is None:
        return base, config
    folder = work / "trained"
    folder.mkdir()
    copy_companions(base, folder)
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder, config


def _not_run(inputs: Mapping[str, Path], outputs: list[str], params: ValidateParams, *, what: str) -> ValidationReport:
    """Return the report on a model of unknown family, whose outputs cannot be compared."""
    why = f"the family of {what} is unknown to the validation, so it was not run"
    result = RunResult(status="not_run", message=why)
    return ValidationReport(
        reference=Reference(description=why, engine=Engine(runtime="")),
        inputs=ValidationInputs(
            samples=0,
            sequence_length=params.sequence_length,
            tokens=0,
            requested_samples=params.test_samples,
            vocabulary=0,
            family="",
            comparison="",
            seed=params.seed,
            prompts=0,
            new_tokens=params.max_new_tokens,
            text_source="none",
            held_out=False,
        ),
        outputs=tuple(result_not_run(begin_result(name, inputs[name], result), result) for name in sorted(outputs)),
    )


def _warn_of_weak_effect(reference: ReferenceRun, ctx: Context) -> None:
    effect = distance_of(reference.adapter_effect)
    if effect is None or effect >= reference.measure.weak_effect:
        return
    kl = reference.adapter_effect.mean_kl if reference.adapter_effect else None
    shown = f"mean KL to the base {effect:.2g} nats/token" if kl is not None else f"relative change {effect**0.5:.2g}"
    ctx.warn(f"the adapter has almost no effect on this text ({shown}): give held-out text like its training data")


class _OneOutput:
    """Runs, times and judges one output after the other."""

    def __init__(
        self,
        prepared: Prepared,
        params: ValidateParams,
        ctx: Context,
        *,
        evaluator: Evaluator,
        stopwatch: Stopwatch,
        long: LongSpec | None,
    ) -> None:
        self._long = long
        self._prepared = prepared
        self._params = params
        self._ctx = ctx
        self._evaluator = evaluator
        self._stopwatch = stopwatch

    def validate(self, name: str, model: Path, folder: Path, *, label: str) -> OutputValidation:
        """Validate one output in a new folder; its progress is reported as ``label``."""
        runtime = runtime_for(name, model)
        spec = self._prepared.spec(
            runtime.load if runtime else "", model, params=self._params, threads=self._ctx.threads
        )
        spec = spec.model_copy(update={"long": self._long})
        speed, note = None, ""
        result = why_not_run(name, model, runtime, self._prepared.family)
        if result is None:
            result, speed, note = self._run(spec, folder, label)
        if result.reason == "DISK_FULL":
            require_success(result, what=name, remedy="")
        found = self._evaluator.evaluate(name, model, spec=spec, result=result, run_folder=folder)
        if found.status is OutputStatus.FAILED:
            self._ctx.warn(f"{name} failed validation: {found.explanation}; {found.remedy}")
        return found.model_copy(update={"speed": speed, "notes": (*found.notes, *filter(None, (note,)))})

    def _run(self, spec: RunSpec, folder: Path, label: str) -> tuple[RunResult, Speed | None, str]:
        """Run an output; return its result, its speed, and why there is no speed."""
        self._stopwatch.make_room()
        result, speed, note = self._run_once(spec, folder, label)
        if result.reason in OUT_OF_MEMORY and self._stopwatch.waits:
            self._stopwatch.release(NO_ROOM)
            shutil.rmtree(folder)
            result, speed, note = self._run_once(spec, folder, label)
        return result, speed, note

    def _run_once(self, spec: RunSpec, folder: Path, label: str) -> tuple[RunResult, Speed | None, str]:
        timeout = self._params.output_timeout_seconds
        with process.start_runner(Spec(run=spec), folder, self._ctx, label=label, timeout_seconds=timeout) as runner:
            if runner.result.status != "done" or spec.benchmark is None:
                return runner.result, None, ""
            return runner.result, *self._stopwatch.time(runner)


def _record(report: ValidationReport, ctx: Context) -> None:
    ctx.record(
        validation_passed=report.passed,
        failed_outputs=list(report.failed_outputs),
        not_run_outputs=list(report.not_run_outputs),
        validation_seconds=round(report.seconds, 2),
        outputs={output.name: _summary(output) for output in report.outputs},
    )


def _summary(output: OutputValidation) -> dict[str, object]:
    speed, memory, distance = output.speed, output.memory, output.to_reference
    return {
        "status": output.status.value,
        "size_bytes": output.size_bytes,
        "prefill_ms": speed.prefill_ms if speed else None,
        "decode_tokens_per_second": speed.decode_tokens_per_second if speed else None,
        "speed_stable": speed.stable if speed else None,
        "peak_rss_bytes": memory.peak_rss_bytes if memory else None,
        "mean_kl": distance.mean_kl if distance else None,
        "top1_agreement": distance.top1_agreement if distance else None,
        "relative_error": distance.relative_error if distance else None,
        "perplexity": output.perplexity,
        "explanation": output.explanation,
        "remedy": output.remedy,
    }
