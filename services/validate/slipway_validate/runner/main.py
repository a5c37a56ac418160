"""Run one model in one process: ``python -P -m slipway_validate.runner.main FOLDER`` executes ``FOLDER/spec.json``.

Progress goes to stdout as JSON lines, and the result to ``FOLDER/result.json``. If speed is measured, the process then waits
with its model, and times a round at each request on its standard input. It ends when the stage that started it ends, and at the
end of its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

from slipway.errors import ModelExportError
from slipway.machine.known_faults import translate_fault
from slipway.machine.shortages import GPU_MEMORY
from slipway.model.folder import ModelFolder
from slipway.proof.runtime import (
    OWN_FILE,
    LanguageModel,
    NotRunnable,
    Samples,
    UnplacedTensors,
    Unusable,
    UnusableInput,
)
from slipway.validation.pictures import Sense
from slipway.validation.speed import Memory
from slipway.validation.survival import AdapterSurvival
from slipway_validate.protocol.inputs import INPUTS_FILE, PromptSpec
from slipway_validate.protocol.messages import (
    BEGIN,
    IMPORTED,
    RESULT_FILE,
    ROUND,
    SPEC_FILE,
    SURVIVAL_FILE,
    TIME,
    WAITING,
    ExplainSpec,
    RunResult,
    RunSpec,
    Spec,
    SurvivalSpec,
    TextSpec,
    TokenizeSpec,
    Yardsticks,
)
from slipway_validate.runner import guard
from slipway_validate.runner.benchmark import time_round
from slipway_validate.runner.collect import Collector, Report
from slipway_validate.runner.generation.prompts import answer_prompt
from slipway_validate.runner.own_text import make_own_samples
from slipway_validate.runner.pictures.looking import look_as_reference, look_at_given
from slipway_validate.runner.results import Computed, compute_results

_PASSES = 8
"""How often a model that is computed layer by layer usually goes through its layers."""
SHORTAGES = frozenset({"OUT_OF_MEMORY", "DISK_FULL"})
"""Reasons that are about the machine, whatever error a runtime makes of them."""


def import_loader(spec: RunSpec) -> Callable[[], LanguageModel]:
    """Import a model's runtime, and return the function that loads the model: only that function is timed as loading.

    Raises:
        NotRunnable: A library that it needs is not installed here.
    """
    load = _import_function(spec.runtime)
    folders = [spec.model, *filter(None, (spec.adapter, spec.base))]
    ways = {"by_layers": True} if spec.by_layers else {}  # only runtimes of PyTorch are asked for it
    return lambda: load(*folders, threads=spec.threads, **ways)


def _import_function(reference: str) -> Callable[..., Any]:
    """Import a function of a format, ``module:attribute``.

    Raises:
        NotRunnable: A library that it needs is not installed here.
    """
    module, _, attribute = reference.partition(":")
    gc.disable()  # objects that an import makes stay; looking for garbage among them takes a quarter of the import
    try:
        function: Callable[..., Any] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise NotRunnable(f"its runtime cannot be used here ({error}): pip install {error.name or module}") from error
    finally:
        gc.enable()
    return function


def run_model(spec: RunSpec, folder: Path, commands: SimpleQueue[str] | None) -> tuple[RunResult, LanguageModel]:
    """Load a model, run it in its native type (for its memory), then compute the results to compare.

    Raises:
        NotRunnable: This machine cannot run it.
        Unusable: It cannot be loaded.
    """
    load = import_loader(spec)
    if spec.held and commands is not None:
        _write({IMPORTED: True})
        while commands.get() != BEGIN:
            pass
    baseline = guard.rss_bytes()
    begin = time.perf_counter()
    model = load()
    load_seconds = time.perf_counter() - begin - model.preparation_seconds
    if spec.asks:
        answer_prompt(model, spec, folder, report=_report)
        device, engine = model.device, model.engine
        return RunResult(engine=engine, device=device, load_seconds=load_seconds), model
    samples = Samples.read(spec.samples)
    report: Report = _report
    if spec.by_layers:  # all samples go through a layer together, so none of them says how far the work is
        model.watch_layers(_report_layers)
        report = _report_nothing
    collector = Collector(model, spec, samples, folder, report=report)

    if not spec.only_timed:
        model.together([collector.native_case])
    if spec.benchmark:
        # The first round is slower; its memory counts, its time does not.
        time_round(model, samples, spec.benchmark.model_copy(update={"prefills": 0, "decode_steps": 1}))
    memory = Memory(
        peak_rss_bytes=guard.peak_rss_bytes(),
        baseline_rss_bytes=baseline,
        peak_device_bytes=model.peak_device_bytes(),
    )

    computed = Computed() if spec.only_timed else compute_results(model, spec, collector, report=report)
    result = RunResult(
        engine=model.engine,
        vocabulary=collector.vocabulary,
        load_seconds=load_seconds,
        memory=memory,
        non_finite=collector.non_finite,
        first_non_finite=collector.first_non_finite,
        skipped_cases=collector.skipped,
        continuations=computed.continuations,
        long=computed.long,
        answers=computed.answers,
        texts=computed.texts,
        architecture=model.architecture,
        adapter=computed.adapter,
        device=model.device,
    )
    if not spec.only_timed:
        _look(model, spec, result, folder)
        if spec.benchmark:
            model.leave_comparison()
    return result, model


def _look(model: LanguageModel, spec: RunSpec, result: RunResult, folder: Path) -> None:
    """Compute prompts with a picture or sound, if the model takes any. The result is written before: native code may end the process."""
    given = any((spec.samples / each).is_dir() for each in Sense)
    if not spec.pictures and not (given and spec.write_logits):
        return
    _write_result(result, folder)
    look = look_as_reference if spec.pictures else look_at_given
    look(model, spec, folder, report=_report)


def take_rounds(spec: RunSpec, model: LanguageModel, commands: SimpleQueue[str]) -> NoReturn:
    """Execute commands for as long as the stage runs; the thread that reads them then ends the process."""
    assert spec.benchmark is not None
    samples = Samples.read(spec.samples)
    _write({WAITING: True})
    while True:
        if commands.get() == TIME:
            _write({ROUND: time_round(model, samples, spec.benchmark).model_dump()})


def tokenize(spec: TokenizeSpec) -> RunResult:
    """Make the samples.

    Raises:
        Unusable: There is no tokenizer or feature extractor, or too little text.
    """
    from slipway_validate.runner.sampling.making import make_samples, trained_tokenizer

    model = ModelFolder.open(spec.model)
    samples, source = make_samples(spec, model)
    samples.write(spec.samples)
    if spec.text.with_name(OWN_FILE).is_file():
        make_own_samples(trained_tokenizer(spec.tokenizer, spec.model), spec, model)
    if spec.records is not None:
        from slipway_validate.runner.sampling.encoding import encode_inputs

        encoded = encode_inputs(trained_tokenizer(spec.tokenizer, spec.model), spec, model)
        (spec.samples / INPUTS_FILE).write_text(encoded.model_dump_json(), encoding="utf-8")
    return RunResult(source=source)


def read_texts(spec: TextSpec) -> RunResult:
    """Write how transformers reads hard texts.

    Raises:
        Unusable: There is no tokenizer.
    """
    from slipway_validate.runner.texts import write_texts

    write_texts(spec)
    return RunResult()


def read_prompt(spec: PromptSpec) -> RunResult:
    """Turn a prompt into tokens.

    Raises:
        Unusable: There is no tokenizer, or the prompt does not fit.
    """
    from slipway_validate.runner.sampling.prompts import encode_prompt

    encode_prompt(spec)
    return RunResult()


def explain(spec: ExplainSpec) -> RunResult:
    """Return the format's explanation of why an output differs from the model.

    Raises:
        NotRunnable: A library that it needs is not installed here.
    """
    inexact = {} if spec.exact else {"exact": False}
    return RunResult(message=str(_import_function(spec.function)(spec.output, spec.model, **inexact)))


def execute(
    spec: Spec, folder: Path, commands: SimpleQueue[str] | None = None
) -> tuple[RunResult, LanguageModel | None]:
    """Execute a spec; every failure becomes a result. Return the result and, if it ran, the model."""
    try:
        if spec.tokenize is not None:
            return tokenize(spec.tokenize), None
        if spec.texts is not None:
            return read_texts(spec.texts), None
        if spec.prompt is not None:
            return read_prompt(spec.prompt), None
        if spec.explain is not None:
            return explain(spec.explain), None
        return run_model(spec.run, folder, commands) if spec.run is not None else (RunResult(), None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a runtime's errors share no base, and a panic of tokenizers is no Exception
        return _to_result(error), None


def compare_weights(spec: SurvivalSpec, folder: Path) -> None:
    """Write what the outputs hold of the adapter. An error becomes their finding, and leaves the result of the run as it is."""
    try:
        from slipway_validate.runner.survival.measuring import measure

        findings = measure(spec, report=lambda done, total: _report("weights", done, total))
    except Exception as error:  # noqa: BLE001 - as in execute()
        findings = dict.fromkeys(spec.outputs, AdapterSurvival(not_run=f"{type(error).__name__}: {error}"))
    document = {name: each.model_dump(mode="json") for name, each in findings.items()}
    (folder / SURVIVAL_FILE).write_text(json.dumps(document), encoding="utf-8")


def measure_yardsticks(spec: Yardsticks, folder: Path) -> None:
    """Compute the passes with which outputs are measured. An error leaves the result of the run as it is: then nothing is measured."""
    with contextlib.suppress(Exception):
        from slipway_validate.runner.yardsticks.computing import compute_yardsticks

        compute_yardsticks(spec, folder, report=_report)


def _to_result(error: BaseException) -> RunResult:
    known = translate_fault(error) if isinstance(error, Exception) else None
    # Something else fills the GPU, and nothing was learned of the model.
    if known is not None and known.reason == GPU_MEMORY.reason:
        return RunResult(status="not_run", reason=known.reason, message=f"{known.message}; {known.remedy}")
    match error:
        case NotRunnable():
            return RunResult(status="not_run", message=str(error))
        case UnusableInput():
            remedy = "change it as said, shorten it, leave it out, or set chat: false if the model's chat template refuses it"
            return RunResult(status="failed", reason="VALIDATION_IMPOSSIBLE", message=str(error), remedy=remedy)
        case UnplacedTensors():
            message = f"the reference was not run: {error}; please report this message"
            return RunResult(status="not_run", reason="VALIDATION_IMPOSSIBLE", message=message)
        case ModelExportError():
            return RunResult(status="failed", reason=error.reason, message=error.message, remedy=error.remedy)
    reason = known.reason if known is not None and known.reason in SHORTAGES else "VALIDATION_IMPOSSIBLE"
    message = str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"
    return RunResult(status="failed", reason=reason, message=message)


def _write_result(result: RunResult, folder: Path) -> None:
    temporary = folder / f"{RESULT_FILE}.part"
    temporary.write_text(result.model_dump_json(), encoding="utf-8")
    temporary.replace(folder / RESULT_FILE)


def _report(phase: str, done: int, total: int) -> None:
    _write({"phase": phase, "done": done, "total": total})


def _report_nothing(*_: object) -> None:
    """Report nothing."""


def _report_layers(done: int, in_pass: int) -> None:
    passes = max(_PASSES, -(-done // in_pass))
    _write({"phase": "layers", "done": done, "total": passes * in_pass, "unit": "layers"})


def _write(line: dict[str, object]) -> None:
    print(json.dumps(line), file=_progress, flush=True)


_progress: TextIO = sys.stdout


def main() -> int:
    """Run the program."""
    global _progress  # noqa: PLW0603 - main() runs once per process
    _progress = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native libraries print past sys.stdout
    commands = guard.die_with_parent()
    folder = Path(sys.argv[1])
    tempfile.tempdir = str(folder)  # the stage removes it, however this process ends
    spec = Spec.model_validate_json((folder / SPEC_FILE).read_text(encoding="utf-8"))
    # Libraries may print to stdout: only our lines may reach the pipe.
    with contextlib.redirect_stdout(sys.stderr):
        result, model = execute(spec, folder, commands)
        _write_result(result, folder)
        if spec.survival is not None:
            compare_weights(spec.survival, folder)
        if spec.yardsticks is not None:
            measure_yardsticks(spec.yardsticks, folder)
        if model is not None and spec.run is not None and spec.run.benchmark is not None:
            take_rounds(spec.run, model, commands)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is complete; unloading gigabytes and native threads would only take time or crash


if __name__ == "__main__":
    main()
