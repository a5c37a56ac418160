"""Turn a verdict of the validation into failures of the attempts whose outputs failed, so that recovery can make these again. Pure.

A verdict is a result, not an error. With ``validation.on_failure: fallback``, a failed output counts as a failure of the attempt that
made it, with the reason ``VALIDATION_FAILED``; the stage's rules choose the next attempt, as after any other failure.

An output may also pass with a warning, because it keeps too little of the fine-tune. It is made again too, if ``optimization.method`` is
not set and a rule for ``TOO_COARSE`` has a better method; otherwise it is delivered as it is.
"""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict

from slipway.errors import Failure, ValidationError
from slipway.formats.registry import is_level
from slipway.planning.references import VALIDATION, producers
from slipway.registry import plays
from slipway.stage import Role
from slipway.texts import one_line
from slipway.validation.findings import TOO_COARSE, failure_prefix, warning_prefix
from slipway.validation.verdicts import Answer
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskRecord, TaskState
from slipway_coordinator.lifecycle.transitions import Event, EventKind

FALLBACK = "fallback"
MODULES = "modules"
"""Key of ``about`` with the modules that hold least of the adapter, one a line."""
_MEASURED = ("mean_kl", "top1_agreement", "relative_error", "perplexity")
_LONGEST = 2000


class _Output(BaseModel):
    """Facts that validation recorded about one output. Unknown facts, from a worker of another version, are ignored."""

    model_config = ConfigDict(extra="ignore")

    failed_checks: int | None = None
    fit: str = ""
    fit_said: str = ""
    explanation: str = ""
    remedy: str = ""
    mean_kl: float | None = None
    top1_agreement: float | None = None
    relative_error: float | None = None
    perplexity: float | None = None
    worst_modules: list[str] = []


class _Verdict(BaseModel):
    model_config = ConfigDict(extra="ignore")

    failed_outputs: list[str] = []
    outputs: dict[str, _Output] = {}


def find_rejected(record: ExportRecord, event: Event) -> dict[str, Failure]:
    """Find the outputs at a level that a validation fails; return their failures by the task that can make each again.

    That task is the one that rounded the weights, even if another task converted the result. Any event but a validation's success gives
    no failures. An output made from a failed output is left out, because the fault is not its own. So is an output that could not be
    run: its weights were not judged, and a wider level needs even more memory.
    """
    wanted = record.configuration.get("validation", {}).get("on_failure") == FALLBACK
    task = next((task for task in record.tasks if task.id == event.task), None)
    if not wanted or event.kind is not EventKind.SUCCEEDED or record.state is not ExportState.RUNNING:
        return {}
    if task is None or task.format != VALIDATION or not task.attempts or task.attempt.number != event.attempt:
        return {}
    if task.attempt.state.ended:
        return {}
    try:
        verdict = _Verdict.model_validate(event.facts)
    except pydantic.ValidationError:
        return {}
    failed = {name for name in verdict.failed_outputs if verdict.outputs.get(name, _Output()).failed_checks != 0}
    judged = [
        (made, verdict.outputs.get(made.format, _Output()))
        for made in record.tasks
        if made.state is TaskState.SUCCEEDED and is_level(made.format) and not _formats_before(record, made) & failed
    ]
    coarse = {
        _rounding_task(record, made).id: _coarse_failure(made.format, output)
        for made, output in judged
        if output.fit == Answer.WARNING and made.format not in verdict.failed_outputs
    }
    chosen = record.configuration.get("optimization", {}).get("method") is not None
    return ({} if chosen else coarse) | {
        _rounding_task(record, made).id: _failure(made.format, output)
        for made, output in judged
        if made.format in failed
    }


def _rounding_task(record: ExportRecord, made: TaskRecord) -> TaskRecord:
    """Return the task that rounded an output's weights: one before it that delivers nothing itself, or its own."""
    before = map(record.task, producers(made.inputs))
    return next((task for task in before if not task.format and plays(task.stage, Role.QUANTIZATION)), made)


def _formats_before(record: ExportRecord, task: TaskRecord) -> set[str]:
    """Return the delivered formats from which a task's output was made."""
    formats: set[str] = set()
    for producer in map(record.task, producers(task.inputs)):
        formats |= {producer.format, *_formats_before(record, producer)}
    return formats - {""}


def _coarse_failure(name: str, output: _Output) -> Failure:
    said = one_line(output.fit_said)[:_LONGEST] or "it keeps less of the fine-tune than it should"
    return ValidationError(
        f"{warning_prefix(name)}{said}",
        reason=TOO_COARSE,
        remedy="choose integers by text (optimization.method: auto), or a level with more bits",
        about={"output": name},
    ).failure()


def _failure(name: str, output: _Output) -> Failure:
    measured: dict[str, Any] = {each: getattr(output, each) for each in _MEASURED}
    said = one_line(output.explanation)[:_LONGEST] or "it differs from the reference"
    failure = ValidationError(
        f"{failure_prefix(name)}{said}",
        remedy=one_line(output.remedy)[:_LONGEST],
        about={"output": name, **{each: f"{value:.4g}" for each, value in measured.items() if value is not None}},
    ).failure()
    modules = "\n".join(one_line(each) for each in output.worst_modules)
    return Failure.from_json(
        {**failure.to_json(), "about": {**failure.about, **({MODULES: modules} if modules else {})}}
    )
