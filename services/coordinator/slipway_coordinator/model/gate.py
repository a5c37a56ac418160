"""Turn a verdict of the validation into failures of the attempts whose outputs failed, so that recovery can make these again. Pure.

What validation finds is a result and not an error. With ``validation.on_failure: fallback`` it counts as a failure of the attempt that
made the output, with the reason ``VALIDATION_FAILED``; the rules of the stage decide about the next one as after any other failure.

An output that passes with a warning, because it keeps less of the fine-tune than it should, is made again as well if nobody chose how to
round it (``optimization.method``) and a rule for ``TOO_COARSE`` knows something better; if none does, it is delivered as it is.
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
from slipway.validation.findings import TOO_COARSE, failed_validation, passed_with_warning
from slipway.validation.verdicts import Answer
from slipway_coordinator.model.records import ExportRecord, TaskRecord
from slipway_coordinator.model.states import ExportState, TaskState
from slipway_coordinator.model.transitions import Event, EventKind

FALLBACK = "fallback"
MODULES = "modules"
"""Key of ``about`` with the modules that hold least of the adapter, one a line."""
_MEASURED = ("mean_kl", "top1_agreement", "relative_error", "perplexity")
_LONGEST = 2000


class _Output(BaseModel):
    """What validation recorded about one output. A worker of another version records other things: they are left out."""

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


def rejected(record: ExportRecord, event: Event) -> dict[str, Failure]:
    """Return the failures of the outputs at a level that an event shows to fail, by the task that can make each again; empty for any
    other event. That is the task that rounded the weights, also if another one only converted the result.

    An output made of one that failed itself is left out: the fault is not its own. So is one that could not be run: its weights were not
    judged, and a wider level needs even more memory.
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
        found = _Verdict.model_validate(event.facts)
    except pydantic.ValidationError:
        return {}
    failed = {name for name in found.failed_outputs if found.outputs.get(name, _Output()).failed_checks != 0}
    judged = [
        (made, found.outputs.get(made.format, _Output()))
        for made in record.tasks
        if made.state is TaskState.SUCCEEDED and is_level(made.format) and not _formats_before(record, made) & failed
    ]
    coarse = {
        _rounding(record, made).id: _too_coarse(made.format, output)
        for made, output in judged
        if output.fit == Answer.WARNING and made.format not in found.failed_outputs
    }
    chosen = record.configuration.get("optimization", {}).get("method") is not None
    return ({} if chosen else coarse) | {
        _rounding(record, made).id: _failure(made.format, output) for made, output in judged if made.format in failed
    }


def _rounding(record: ExportRecord, made: TaskRecord) -> TaskRecord:
    """Return the task that rounded an output's weights: one before it that delivers nothing itself, or its own."""
    before = map(record.task, producers(made.inputs))
    return next((task for task in before if not task.format and plays(task.stage, Role.QUANTIZATION)), made)


def _formats_before(record: ExportRecord, task: TaskRecord) -> set[str]:
    """Return the delivered formats from which a task's output was made."""
    found: set[str] = set()
    for producer in map(record.task, producers(task.inputs)):
        found |= {producer.format, *_formats_before(record, producer)}
    return found - {""}


def _too_coarse(name: str, found: _Output) -> Failure:
    said = one_line(found.fit_said)[:_LONGEST] or "it keeps less of the fine-tune than it should"
    return ValidationError(
        f"{passed_with_warning(name)}{said}",
        reason=TOO_COARSE,
        remedy="choose integers by text (optimization.method: auto), or a level with more bits",
        about={"output": name},
    ).failure()


def _failure(name: str, found: _Output) -> Failure:
    measured: dict[str, Any] = {each: getattr(found, each) for each in _MEASURED}
    said = one_line(found.explanation)[:_LONGEST] or "it differs from the reference"
    failure = ValidationError(
        f"{failed_validation(name)}{said}",
        remedy=one_line(found.remedy)[:_LONGEST],
        about={"output": name, **{each: f"{value:.4g}" for each, value in measured.items() if value is not None}},
    ).failure()
    modules = "\n".join(one_line(each) for each in found.worst_modules)
    return Failure.from_json(
        {**failure.to_json(), "about": {**failure.about, **({MODULES: modules} if modules else {})}}
    )
