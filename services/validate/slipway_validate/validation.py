"""Run one validation from inputs to report: text, reference, one output after the other, verdict."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from slipway.errors import ValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER
from slipway.stage import Context
from slipway.validation.findings import (
    OutputStatus,
    OutputValidation,
    Reference,
    ValidationInputs,
    ValidationReport,
    failure_prefix,
)
from slipway.validation.inputs import NOT_OUTPUTS, TEST_INPUTS, input_of, output_of
from slipway.validation.speed import Engine
from slipway.validation.texts import TextComparison
from slipway.validation.verdicts import Answer
from slipway_validate.answers.records import FORMS, choose_records
from slipway_validate.answers.scores import Scorer
from slipway_validate.basis import REFERENCE, TIMING, prepare_basis
from slipway_validate.folders import float32_bytes, runtime_for
from slipway_validate.judging import pictures
from slipway_validate.judging.distances import LIMITS, limits_by_level
from slipway_validate.judging.evaluate import MERGED, Evaluator, begin_result, result_not_run
from slipway_validate.judging.fit import name_alternatives
from slipway_validate.judging.texts import Texts, read_texts
from slipway_validate.outputs import OutputRun, OutputRuns, add_diagnosis, has_room
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import (
    Prepared,
    benchmark_of,
    decoder,
    expected_senses,
    long_spec,
    open_models,
    require_success,
    unknown_family,
)
from slipway_validate.protocol.inputs import INPUTS_FILE, EncodedInputs
from slipway_validate.protocol.messages import RunResult
from slipway_validate.reference.files import NoReferenceError
from slipway_validate.reference.running import describe
from slipway_validate.speed import Stopwatch, note_slower, this_machine
from slipway_validate.stored_weights import StoredWeights, survival_spec


def validate(inputs: Mapping[str, Path], params: ValidateParams, ctx: Context) -> Path:
    """Validate the outputs and write the report; return its folder.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: see :func:`slipway_validate.stage.run`.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    outputs = _outputs(inputs, params)
    before = earlier_verdicts(inputs, params, outputs)
    if before:
        outputs = [name for name in outputs if name not in before or name == MERGED]
        kept = {*NOT_OUTPUTS, *map(input_of, outputs)}
        inputs = {name: folder for name, folder in inputs.items() if name in kept}
    work = ctx.workdir / "runs"
    work.mkdir()
    try:
        report = _run_validation(inputs, outputs, params, ctx, work=work)
        if before:
            judged = {**{output.name: output for output in report.outputs}, **before}
            report = report.model_copy(update={"outputs": tuple(judged[name] for name in sorted(judged))})
        report = note_slower(report, ctx)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    folder = ctx.workdir / "validation"
    folder.mkdir()
    report.write(folder)
    _record(report, ctx)
    return folder


def earlier_verdicts(
    inputs: Mapping[str, Path], params: ValidateParams, outputs: list[str]
) -> dict[str, OutputValidation]:
    """Return the earlier verdicts on outputs that are not judged again; empty without a usable earlier report."""
    if params.again is None or "before" not in inputs:
        return {}
    try:
        report = ValidationReport.read(inputs["before"])
    except (OSError, ValueError):
        return {}
    return {each.name: each for each in report.outputs if each.name in outputs and each.name not in params.again}


def _outputs(inputs: Mapping[str, Path], params: ValidateParams) -> list[str]:
    """Return the names of the outputs: the merged model first, because others are compared with it; then by name."""
    unknown = sorted(set(params.limits) - set(LIMITS))
    if unknown:
        message, remedy = f"limits are given for unknown levels {unknown}", f"levels are {', '.join(LIMITS)}"
        raise ValidationError(message, reason="VALIDATION_IMPOSSIBLE", remedy=remedy)
    outputs = sorted(map(output_of, set(inputs) - set(NOT_OUTPUTS)), key=lambda name: (name != MERGED, name))
    if not outputs:
        remedy = f"give at least one output by its format's name, for example {MERGED}"
        raise ValidationError("there is no output to validate", reason="VALIDATION_IMPOSSIBLE", remedy=remedy)
    return outputs


def _run_validation(
    inputs: Mapping[str, Path], outputs: list[str], params: ValidateParams, ctx: Context, *, work: Path
) -> ValidationReport:
    begin = time.monotonic()
    base, trained = open_models(inputs, work)
    family = trained.family
    if family is None:
        return _skip_all(inputs, outputs, params, why=unknown_family(trained.config))
    with ExitStack() as running:
        folders = {name: inputs[input_of(name)] for name in outputs}
        try:
            basis = prepare_basis(
                trained, inputs, family, params, ctx, base=base, outputs=folders, work=work, running=running
            )
        except NoReferenceError as none:
            return _skip_all(inputs, outputs, params, why=none.message)
        prepared, reference, params = basis.prepared, basis.reference, basis.params
        limits = limits_by_level(params.limits)
        stored = StoredWeights(
            survival_spec(inputs, limits) if reference else None,
            ctx,
            folder=work / "stored_weights",
            timeout_seconds=params.output_timeout_seconds,
            beside=(basis.waiting, work / TIMING) if basis.waiting and REFERENCE in inputs else None,
            yardsticks=basis.yardsticks,
            reference=reference,
        )
        evaluator = Evaluator(
            reference,
            family,
            limits,
            decode=decoder(prepared.tokenizer),
            survival=lambda: stored.survival,
            measured=lambda: stored.measured,
            scorer=_scorer(inputs, trained.config, prepared, params, ctx),
            threads=ctx.threads,
            base=base,
            expected_senses=expected_senses(trained.config, family),
            elsewhere=bool(prepared.text.source) and not prepared.text.held_out,
        )
        if family is DECODER and trained.config.takes_more_than_text:
            for said in pictures.list_warnings(trained.config, evaluator.beside):
                ctx.warn(said)
        model_bytes, timeout = float32_bytes(base), params.output_timeout_seconds
        stopwatch = Stopwatch(basis.waiting, params, ctx, model_bytes=model_bytes, why=basis.alone)
        texts = read_texts(
            folders, prepared.tokenizer, inputs["base"], ctx, folder=work / "texts", timeout_seconds=timeout
        )
        outputs_run = OutputRuns(
            prepared,
            params,
            ctx,
            base=inputs["base"],
            stopwatch=stopwatch,
            benchmark=benchmark_of(params, trained.config, family),
            long=long_spec(prepared, trained.config, params, reference=reference.result) if reference else None,
            drafts=reference.result.continuations if reference and params.evidence.drafts else (),
            texts=texts,
            settings=trained.path if reference else None,
            memory=basis.memory,
            ahead=has_room(model_bytes, params, ctx, work=work),
        )
        taken = outputs_run.take(folders, work / "outputs")
        model, exact = inputs.get(MERGED, inputs["base"]), MERGED in inputs or "adapter" not in inputs
        results = [
            _judge_output(run, evaluator, ctx, texts, timeout, model=model, exact=exact)
            for run in running.enter_context(closing(taken))
        ]
        of_reference = describe(reference, stopwatch.reference_speed(), beside=evaluator.beside)
    judged = name_alternatives(sorted(results, key=lambda result: result.name))
    for each in judged:
        if each.status is OutputStatus.FAILED:
            ctx.warn(f"{failure_prefix(each.name)}{each.explanation}; {each.remedy}")
    return ValidationReport(
        reference=of_reference,
        inputs=prepared.describe(params, vocabulary=reference.result.vocabulary if reference else 0),
        outputs=tuple(judged),
        warnings=(*basis.warnings, *ctx.facts.get("warnings", ()), *_list_little_kept(judged)),
        seconds=time.monotonic() - begin,
        machine=this_machine(),
    )


def _scorer(
    inputs: Mapping[str, Path], model: ModelConfig, prepared: Prepared, params: ValidateParams, ctx: Context
) -> Scorer | None:
    """Make the scorer of the answers to test inputs; None if there are none."""
    family, encoded = prepared.family, prepared.folder / INPUTS_FILE
    if (TEST_INPUTS in inputs or params.test_inputs) and family.name not in FORMS:
        ctx.warn(f"the test inputs were not answered: a {family.name} answers none")
    if not encoded.is_file():
        return None
    readable = (prepared.tokenizer / "tokenizer.json").is_file()
    return Scorer(
        records=choose_records(inputs, model, family, params),
        encoded=EncodedInputs.model_validate_json(encoded.read_bytes()),
        family=family,
        config=model,
        decode=decoder(prepared.tokenizer) if readable else None,
    )


def _list_little_kept(outputs: list[OutputValidation]) -> list[str]:
    """Return a warning for each output that passes, but keeps little of the fine-tune."""
    return [f"{each.name}: {each.fit.said}" for each in outputs if each.passed and each.fit.answer is Answer.WARNING]


def _skip_all(inputs: Mapping[str, Path], outputs: list[str], params: ValidateParams, *, why: str) -> ValidationReport:
    """Report that no output was run, because the validation does not understand the model or adapter."""
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
        outputs=tuple(
            result_not_run(begin_result(name, inputs[input_of(name)], result), result) for name in sorted(outputs)
        ),
    )


def _judge_output(
    run: OutputRun,
    evaluator: Evaluator,
    ctx: Context,
    texts: Texts,
    timeout_seconds: float,
    *,
    model: Path,
    exact: bool,
) -> OutputValidation:
    """Judge an output that was run and timed; if it failed, add the diagnosis of its format, which compares it with ``model``."""
    result, runtime = run.result, runtime_for(run.name, run.model)
    if result.reason == "DISK_FULL":
        require_success(result, what=run.name, remedy="")
    if texts.missing and runtime is not None and runtime.reads_text:
        result = result.model_copy(update={"texts": TextComparison(not_compared=texts.missing)})
    verdict = evaluator.evaluate(run.name, run.model, spec=run.spec, result=result, run_folder=run.folder)
    verdict = add_diagnosis(
        verdict,
        runtime,
        output=run.model,
        model=model,
        exact=exact,
        ctx=ctx,
        folder=run.folder.with_name(f"{run.folder.name}.explain"),
        timeout_seconds=timeout_seconds,
    )
    return verdict.model_copy(update={"speed": run.speed, "notes": (*verdict.notes, *filter(None, (run.note,)))})


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
        "failed_checks": sum(not check.passed for check in output.checks),
        "fit": output.fit.answer.value,
        "fit_said": output.fit.said,
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
        "worst_modules": [each.module for each in output.survival.drowned] if output.survival else [],
    }
