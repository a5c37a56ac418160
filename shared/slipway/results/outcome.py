"""Make the :class:`ExportResult` from the coordinator's record of an export and the validation report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

from slipway.artifacts import Artifacts
from slipway.base_match import BaseMatch, joined
from slipway.division import is_part
from slipway.errors import Failure, StageError, ValidationError, with_remedy
from slipway.execution.failures import surroundings_of
from slipway.formats.registry import is_adapter_alone, is_level
from slipway.planning.references import VALIDATION, producers
from slipway.registry import plays
from slipway.results.result import (
    AttemptResult,
    ExportResult,
    FailedFormat,
    FormatResult,
    replacements,
    requested_format,
)
from slipway.rpc.values import dict_of, failure_of_status
from slipway.stage import Role
from slipway.texts import counted, one_line
from slipway.validation.findings import OutputValidation, ValidationReport, failure_prefix, warning_prefix
from slipway.validation.speed import Ratio, Speed
from slipway.validation.verdicts import Answer
from slipway_protos.v1 import export_pb2 as pb

_NOT_MADE = {
    pb.TASK_STATE_FAILED: "failed",
    pb.TASK_STATE_SKIPPED: "skipped",
    pb.TASK_STATE_CANCELLED: "cancelled",
}


def delivered_formats(export: pb.Export) -> dict[str, str]:
    """Return the digest of each format that is delivered as a folder, in the plan's order."""
    order = {task.format: number for number, task in enumerate(export.tasks)}
    names = sorted(export.outputs, key=lambda name: (order.get(name, len(order)), name))
    return {name: export.outputs[name] for name in names if name != VALIDATION}


def requested_formats(export: pb.Export) -> dict[str, pb.Task]:
    """Return the task of each requested format, in the plan's order."""
    return {requested_format(task): task for task in export.tasks if task.format and task.format != VALIDATION}


def is_plain(export: pb.Export) -> bool:
    """Return whether a model was exported as it is, without an adapter."""
    return "base" in export.sources and "adapter" not in export.sources


def export_id(export: pb.Export) -> str:
    """Return the last part of an export's name."""
    return export.name.rpartition("/")[2]


def export_result(
    export: pb.Export,
    *,
    store: Artifacts,
    validation: ValidationReport | None = None,
    output_directory: Path | None = None,
    report: str = "report.html",
    warnings: Sequence[str] = (),
) -> ExportResult:
    """Return the result of an ended export.

    Args:
        export: The coordinator's record.
        store: Store of its artifacts, for their sizes.
        validation: The validation report; None if nothing was validated.
        output_directory: Folder of the delivery; None if nothing was delivered.
        report: The report's main file in that folder.
        warnings: Warnings of the command itself, such as skipped checkpoints.
    """
    failure = export_failure(export, validation)
    replaced = replacements(export)
    asked = {task.format: name for name, task in requested_formats(export).items() if task.format != name}
    original = original_bytes(export, store)
    validated = {output.name: output for output in validation.outputs} if validation else {}
    formats = {
        name: format_result(
            digest,
            size_bytes=store.manifest(digest).distinct_bytes,
            original=None if is_adapter_alone(name) else original,
            found=validated.get(name),
        ).model_copy(update={"requested": asked.get(name, ""), "replaced": replaced.get(name, "")})
        for name, digest in delivered_formats(export).items()
    }
    smallest = min((entry.size_bytes for name, entry in formats.items() if not is_adapter_alone(name)), default=None)
    stable = [entry.inference_speed_ms for entry in formats.values() if entry.inference_speed_stable]
    memory = [entry.memory_usage_mb for entry in formats.values()]
    folder = str(output_directory) if output_directory else ""
    return ExportResult(
        export_id=export_id(export),
        timestamp=export.create_time.ToDatetime(UTC),
        success=failure is None,
        paths={name: str(output_directory / name) for name in formats} if output_directory else {},
        output_directory=folder,
        formats=formats,
        requested=tuple(requested_formats(export)),
        failed=failed_formats(export),
        original_size_bytes=original,
        optimized_size_bytes=smallest,
        size_reduction_percent=_reduction(smallest, original),
        inference_speed_ms=_least(stable),
        memory_usage_mb=_least(memory),
        validation_passed=None if validation is None else validation.passed,
        plain=is_plain(export),
        base_match=None if is_plain(export) else joined(BaseMatch.of_labels(export.labels), validation),
        multi_token_head=validation.reference.multi_token_head if validation else None,
        validation_report_path=str(output_directory / report) if output_directory else "",
        reason=failure.reason if failure else "",
        error_message=str(failure) if failure else "",
        warnings=(*replaced.values(), *_warnings(export, warnings, validation)),
        attempts=tuple(_attempt(task, attempt) for task in export.tasks for attempt in task.attempts),
    )


def export_failure(export: pb.Export, validation: ValidationReport | None) -> Failure | None:
    """Return the failure of an ended export; None if it succeeded. A failed validation is a failure too, and takes precedence."""
    return _deciding_failure(export, _validation_failure(export, validation))


def _is_kept(export: pb.Export, name: str, *, failed_checks: Any) -> bool:
    """Return whether an output that failed is delivered with a warning: one at a level that ran and exceeded its limits.

    Anything else that fails (the merged model, an output that crashed) is a fault, which no setting excuses.
    """
    exceeded = isinstance(failed_checks, int | float) and failed_checks > 0
    return export.configuration.validation.on_failure == "keep" and is_level(name) and exceeded


def recorded_failure(export: pb.Export) -> Failure | None:
    """Return the failure of an ended export from its record alone, for callers without access to artifacts."""
    facts = [dict_of(task.facts) for task in export.tasks if task.format == VALIDATION]
    failed: dict[str, tuple[str, str]] = {}
    for recorded in facts:
        outputs, names = recorded.get("outputs"), recorded.get("failed_outputs")
        for name in map(str, names if isinstance(names, list) else ()):
            output = outputs.get(name) if isinstance(outputs, dict) else None
            said = output if isinstance(output, dict) else {}
            if _is_kept(export, name, failed_checks=said.get("failed_checks")):
                continue
            failed[name] = (
                str(said.get("explanation") or "it differs from the reference"),
                str(said.get("remedy", "")),
            )
    return _deciding_failure(export, _outputs_failure(failed))


def _deciding_failure(export: pb.Export, validation: Failure | None) -> Failure | None:
    unsuccessful = export.HasField("error") or export.state in (pb.EXPORT_STATE_FAILED, pb.EXPORT_STATE_CANCELLED)
    ended = _ending_failure(export) if unsuccessful else None
    failures = [failure for failure in (ended, validation) if failure is not None]
    failure = Failure.deciding(failures)
    beside = [other for other in failures if other is not failure]
    if failure is None or not beside:
        return failure
    other = f"in addition, {beside[0].reason}: {beside[0].message}"
    return replace(failure, message=with_remedy(failure.message, other))


def _ending_failure(export: pb.Export) -> Failure:
    """Return the failure that ended an export: ``CANCELLED`` for a cancelled one, unless a task failed before."""
    if export.state == pb.EXPORT_STATE_CANCELLED and not export.HasField("error"):
        return StageError("the export was cancelled", reason="CANCELLED").failure()
    return failure_of_status(export.error)


def _validation_failure(export: pb.Export, validation: ValidationReport | None) -> Failure | None:
    failed = {}
    for output in _unexcused_outputs(export, validation):
        checks = "; ".join(str(check) for check in output.failed_checks[:3])
        failed[output.name] = (output.explanation or checks or output.status_reason, output.remedy)
    return _outputs_failure(failed)


def _unexcused_outputs(export: pb.Export, validation: ValidationReport | None) -> list[OutputValidation]:
    """Return the outputs that failed and are not kept."""
    failed = [validation.output(name) for name in validation.failed_outputs] if validation else []
    return [each for each in failed if not _is_kept(export, each.name, failed_checks=len(each.failed_checks))]


def _outputs_failure(failed: Mapping[str, tuple[str, str]]) -> Failure | None:
    """Return one failure for all outputs that failed validation, a line for each, given the fault and the remedy of each."""
    if not failed:
        return None
    remedies = dict.fromkeys(one_line(remedy) for _, remedy in failed.values() if remedy)
    lines = [f"{failure_prefix(name)}{one_line(what)}" for name, (what, _) in failed.items()]
    heading = [f"{counted(len(lines), 'output')} failed validation"] if len(lines) > 1 else []
    return ValidationError(
        "\n".join([*heading, *lines]),
        remedy="\n".join(remedies) or "see report.html",
        about={"outputs": ", ".join(failed)},
    ).failure()


def failed_formats(export: pb.Export) -> dict[str, FailedFormat]:
    """Return the formats of an ended export that were not made, in the plan's order."""
    formats = {}
    for name, task in requested_formats(export).items():
        if task.state in _NOT_MADE:
            failed = _failed_task(export, task)
            failure = _task_failure(failed)
            message = str(failure) if failure else ""
            unknown = failure is not None and failure.reason == "FAMILY_UNSUPPORTED"
            if failed.id != task.id:
                state = pb.TaskState.Name(failed.state).removeprefix("TASK_STATE_").lower()
                how = f"was not run: {message}" if unknown else "failed" if state == "failed" else f"was {state}"
                message = f"{failed.id}, which it needs, {how}"
            formats[name] = FailedFormat(
                task=task.id,
                state="not_run" if unknown else _NOT_MADE[task.state],
                reason=failure.reason if failure else "",
                error_message=message,
            )
    return formats


def _failed_task(export: pb.Export, task: pb.Task) -> pb.Task:
    """Return the task that caused this one to make nothing: the task itself, or the first task before it that failed."""
    tasks = {each.id: each for each in export.tasks}
    seen: set[str] = set()
    while task.state == pb.TASK_STATE_SKIPPED and task.id not in seen:
        seen.add(task.id)
        missing = [tasks[name] for name in producers(task.inputs) if name in tasks and tasks[name].state in _NOT_MADE]
        task = next(iter(missing), task)
    return task


def _task_failure(task: pb.Task) -> Failure | None:
    errors = [attempt.error for attempt in task.attempts if attempt.HasField("error")]
    return failure_of_status(errors[-1]) if errors else None


def original_bytes(export: pb.Export, store: Artifacts) -> int | None:
    """Return the size of the unquantized merged model or of the one that is exported as it is, in bytes; None if there is none."""
    role = Role.PREPARATION if is_plain(export) else Role.MERGE
    made = [
        task for task in export.tasks if plays(task.stage, role) and task.outputs and not is_part(dict_of(task.params))
    ]
    merged = next((digest for task in made for digest in task.outputs.values()), "")
    if not merged or not store.exists(merged):
        return None
    facts = dict_of(made[0].facts)  # if the weights were left out, the artifact holds only their description
    left_out = facts.get("output_bytes", 0) if facts.get("weights") == "deferred" else 0
    return store.manifest(merged).size_bytes + (int(left_out) if isinstance(left_out, int | float) else 0)


_FIGURES = ("mean_kl", "top1_agreement", "relative_error", "cosine_distance")


def format_result(
    digest: str = "", *, size_bytes: int, original: int | None = None, found: OutputValidation | None
) -> FormatResult:
    """Return the details of one output.

    Args:
        digest: Digest of the artifact; empty for a folder that is not an artifact.
        size_bytes: Size of all its files, each content once.
        original: Size of the unquantized merged model; None if there is none, or if the output is no model to compare with it.
        found: Its validation; None if it was not validated.
    """
    entry = FormatResult(digest=digest, size_bytes=size_bytes, reduction_percent=_reduction(size_bytes, original))
    if found is None:
        return entry
    return entry.model_copy(
        update={
            "status": found.status.value,
            **({name: getattr(found.to_reference, name) for name in _FIGURES} if found.to_reference else {}),
            **(_speed(found.speed) if found.speed else {}),
            "memory_usage_mb": found.memory.peak_rss_bytes / 1e6 if found.memory else None,
        }
    )


def _speed(speed: Speed) -> dict[str, float | bool | None]:
    return {
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "decode_spread_percent": _percent(speed.decode_spread),
        "decode_stable": speed.decode_stable,
        "decode_speedup": _reliable(speed.decode_speedup),
        "inference_speed_ms": speed.prefill_ms,
        "inference_speed_spread_percent": _percent(speed.prefill_spread),
        "inference_speed_stable": speed.prefill_stable,
        "inference_speedup": _reliable(speed.prefill_speedup),
    }


def _reliable(ratio: Ratio | None) -> float | None:
    return ratio.median if ratio is not None and ratio.stable else None


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _reduction(size: int | None, original: int | None) -> float | None:
    return None if size is None or not original else round(100 * (1 - size / original), 2)


def _warnings(export: pb.Export, warnings: Sequence[str], validation: ValidationReport | None) -> tuple[str, ...]:
    """Return all warnings, each once, without those about failed outputs that are already the export's error."""
    failed = _unexcused_outputs(export, validation) if export.state == pb.EXPORT_STATE_SUCCEEDED else []
    said = tuple(failure_prefix(output.name) for output in failed)
    candidates = (*warnings, *_little_kept(validation), *export.warnings, *_stage_warnings(export))
    return _fold_warnings(
        [warning for warning in candidates if not any(text in warning for text in said)],
        {task.id for task in export.tasks},
    )


def _little_kept(validation: ValidationReport | None) -> list[str]:
    """Return a warning for each output that passes, but keeps little of the fine-tune."""
    outputs = validation.outputs if validation else ()
    little = (output for output in outputs if output.passed and output.fit.answer is Answer.WARNING)
    return [f"{warning_prefix(output.name)}{output.fit.said}" for output in little]


def _stage_warnings(export: pb.Export) -> list[str]:
    """Return the warnings that stages recorded with their results, each with its task; the export has them without the task."""
    lines = []
    for task in export.tasks:
        warnings = dict_of(task.facts).get("warnings", [])
        lines += [f"{task.id}: {warning}" for warning in warnings] if isinstance(warnings, list) else []
    return lines


def _fold_warnings(warnings: Sequence[str], tasks: Collection[str]) -> tuple[str, ...]:
    """Return each warning once, in the order of first mention, preceded by all tasks that gave it."""
    by_message: dict[str, list[str]] = {}
    for warning in warnings:
        task, colon, message = warning.partition(": ")
        if not colon or task not in tasks:
            task, message = "", warning
        known = by_message.setdefault(message, [])
        if task and task not in known:
            known.append(task)
    return tuple(f"{', '.join(names)}: {message}" if names else message for message, names in by_message.items())


def _attempt(task: pb.Task, attempt: pb.Attempt) -> AttemptResult:
    failure = failure_of_status(attempt.error) if attempt.HasField("error") else None
    seconds = None
    if attempt.HasField("start_time") and attempt.HasField("end_time"):
        seconds = (attempt.end_time.ToNanoseconds() - attempt.start_time.ToNanoseconds()) / 1e9
    return AttemptResult(
        task=task.id,
        stage=task.stage,
        number=attempt.number,
        outcome=pb.TaskState.Name(attempt.state).removeprefix("TASK_STATE_").lower(),
        params=dict_of(attempt.params),
        rule=attempt.rule,
        reused=attempt.reused,
        worker=attempt.worker,
        reason=failure.reason if failure else "",
        error_message=str(failure) if failure else "",
        duration_seconds=seconds,
        peak_memory_bytes=attempt.peak_memory_bytes,
        memory_sample_seconds=attempt.memory.sample_seconds,
        memory_samples_bytes=tuple(attempt.memory.samples_bytes),
        machine=surroundings_of(failure.about) if failure else {},
    )
