"""The durable workflow of one export: it reads events, decides in stored steps, and is replayed after a crash.

Everything that happens to an export (a lease, a result, a cancellation) is an event in its inbox. The workflow holds the export
as a record, applies pure functions to it, and publishes every new record. The inbox is durable and gives a replayed workflow the
same events in the same order, so reading it is not a step. Decisions that could differ after a restart (they use the recovery
table, the installed formats or the clock) are steps, whose results are stored. Every event makes one revision, however many events are read at once. A
stage's failure is a value in an event, never an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, Protocol

from dbos import DBOS

from slipway.division import is_part
from slipway.errors import Failure, ModelExportError, ServiceError
from slipway.formats.registry import formats, split_output
from slipway.formats.tasks import PlannedTask
from slipway.observability.telemetry import within
from slipway.planning.precedents import PRECEDENT, Precedent, precedent_key
from slipway.registry import plays
from slipway.stage import Role
from slipway.validation.findings import REJECTED
from slipway_coordinator.lifecycle import gate, transitions
from slipway_coordinator.lifecycle.records import AttemptRecord, ExportRecord, ExportState, TaskRecord, TaskState
from slipway_coordinator.lifecycle.recovery import (
    NextAttempt,
    choose_profile,
    is_lasting,
    recover,
    return_to_plan,
    with_guidance,
)
from slipway_coordinator.lifecycle.rules import RuleTable
from slipway_coordinator.lifecycle.scheduling import AGAIN
from slipway_coordinator.storage.inbox import InboxEvent

log = logging.getLogger("slipway.coordinator.workflow")


class Transition(NamedTuple):
    """One transition of an export, at a time in seconds since the epoch; ``before`` is None at the beginning of a run."""

    before: ExportRecord | None
    after: ExportRecord
    at: float


class Surroundings(Protocol):
    """The services that a workflow needs from its process."""

    rules: RuleTable
    alone: bool

    def track_task(self, task: asyncio.Task[Any] | None) -> None:
        """Register the asyncio task that runs a workflow, so that it is stopped with the process."""

    async def events(self, record: ExportRecord, *, after: int) -> list[InboxEvent]:
        """Wait for and return this run's events after the one numbered ``after``."""

    async def publish_revision(self, record: ExportRecord, changes: Sequence[Transition]) -> None:
        """Store a new revision, publish it to watchers, and offer its attempts. Harmless to repeat.

        Args:
            record: The new revision.
            changes: The transitions from the revision published before, in order; empty if it was stored before.
        """

    async def find_precedent(self, key: str, task: PlannedTask) -> Precedent | None:
        """Return the precedent stored under a key, for a task."""

    async def stop_on_fault(self, name: str, failure: Failure) -> None:
        """End an export that a fault in the coordinator itself keeps from continuing."""


# DBOS is one per process and calls workflows by name after a restart, so they find their process through this global.
_current: list[Surroundings] = []


def install_surroundings(surroundings: Surroundings | None) -> None:
    """Set the surroundings of this process's workflows; None at shutdown.

    Raises:
        ServiceError: reason ``COORDINATOR_LOCKED`` when this process runs a coordinator already.
    """
    if surroundings is not None and _current:
        raise ServiceError(
            "this process runs a coordinator already",
            reason="COORDINATOR_LOCKED",
            remedy="end it first, or start another process",
        )
    _current[:] = [] if surroundings is None else [surroundings]


def _surroundings() -> Surroundings:
    """Return the surroundings; while the process stops, cancel the workflow instead: the engine would store an error as its end."""
    if not _current:
        raise asyncio.CancelledError
    return _current[0]


async def begin(record: ExportRecord, *, now: float) -> ExportRecord:
    """Return an export at the beginning of a run, with every task queued that can start. No workflow runs it yet."""
    return await _recall(transitions.begin(record, now=now).with_(revision=record.revision + 1))


@DBOS.workflow(name="slipway.export", max_recovery_attempts=None)
async def export_workflow(text: str) -> str:
    """Run an export that has begun, from the revision that it has reached; return its final state.

    Args:
        text: The export as stored when this workflow was started.
    """
    _surroundings().track_task(asyncio.current_task())
    record = ExportRecord.model_validate_json(text)
    try:
        with within(record.traceparent):
            return await _carry_out(record)
    except Exception as error:
        log.exception(f"{record.name} stopped on a fault of the coordinator")
        await _surroundings().stop_on_fault(record.name, fault(error))
        return ExportState.FAILED.value


async def _carry_out(record: ExportRecord) -> str:
    changes = list[Transition]()
    while True:
        await _surroundings().publish_revision(record, changes)
        if record.state.ended:
            return record.state.value
        changes = []
        for message in await _surroundings().events(record, after=record.events_read):
            before = record
            record = await _apply(record, message.event)
            for task in transitions.undecided_tasks(record):
                record = _apply_decision(record, task, await _decide(record.to_json(), task.id))
            record = await _recall(record)
            record = record.with_(revision=before.revision + 1, events_read=message.number)
            changes.append(Transition(before, record, message.event.time))
            if record.state.ended:
                break


async def _apply(record: ExportRecord, event: transitions.Event) -> ExportRecord:
    rejected = gate.find_rejected(record, event)
    if rejected:
        failures = {task: failure.to_json() for task, failure in rejected.items()}
        decisions = await _decide_rejected(record.to_json(), failures)
        decided = {
            task: (rejected[task], NextAttempt.model_validate(decision["next"]))
            for task, decision in decisions.items()
            if decision["next"] is not None
        }
        if decided:
            profile = next(decision["profile"] for decision in decisions.values())
            return transitions.make_again(record.with_(recovery_profile=profile), event, decided)
    if not transitions.completes_plan(record, event):
        return transitions.apply(record, event)
    planned = await _plan(record.to_json(), event.model_dump(mode="json"))
    if "failure" in planned:
        raise Failure.from_json(planned["failure"]).error()
    return ExportRecord.from_json(planned["record"])


@DBOS.step(name="slipway.plan")
async def _plan(record_json: dict[str, Any], event_json: dict[str, Any]) -> dict[str, Any]:
    """Apply an event that adds the tasks after an import: the formats that plan them may be others after a restart."""
    event = transitions.Event.model_validate(event_json)
    try:
        return {"record": transitions.apply(ExportRecord.from_json(record_json), event).to_json()}
    except ModelExportError as error:
        return {"failure": error.failure().to_json()}


async def _recall(record: ExportRecord) -> ExportRecord:
    """Make tasks begin with the precedent for such a model, as far as their parameters are open."""
    for task in transitions.beginning_tasks(record):
        asked = {"id": task.id, "stage": task.stage, "params": task.params, "open": list(task.open)}
        lookup = await _find_precedent(asked, str(model_facts(record).get("model_class", "")), record.project)
        precedent = Precedent(**lookup["precedent"]) if lookup["precedent"] else None
        record = transitions.begin_with(record, task.id, lookup["key"], precedent)
    return record


@DBOS.step(name="slipway.precedent")
async def _find_precedent(task: dict[str, Any], model: str, project: str) -> dict[str, Any]:
    planned = PlannedTask(task["id"], task["stage"], task["params"], {}, open=tuple(task["open"]))
    key = precedent_key(planned, model, project=project)
    precedent = await _surroundings().find_precedent(key, planned) if key else None
    return {"key": key, "precedent": None if precedent is None else asdict(precedent)}


@DBOS.step(name="slipway.decide")
async def _decide(record_json: dict[str, Any], task_id: str) -> dict[str, Any]:
    record, around = ExportRecord.from_json(record_json), _surroundings()
    return decide(record, record.task(task_id), rules=around.rules, alone=around.alone) | {"time": time.time()}


@DBOS.step(name="slipway.rejected")
async def _decide_rejected(record_json: dict[str, Any], failures: dict[str, Any]) -> dict[str, Any]:
    """Decide about outputs that failed validation: return what :func:`decide` returns, by task."""
    record, around = ExportRecord.from_json(record_json), _surroundings()
    decisions = {}
    for name in sorted(failures):
        task = record.task(name).with_attempt(state=TaskState.FAILED, failure=Failure.from_json(failures[name]))
        decisions[name] = decide(record, task, rules=around.rules, alone=around.alone)
    return decisions


def decide(record: ExportRecord, task: TaskRecord, *, rules: RuleTable, alone: bool) -> dict[str, Any]:
    """Decide about a failed attempt: return its ``next`` attempt or None, and the final ``failure`` with guidance."""
    failure = task.attempt.failure
    assert failure is not None
    settings = record.configuration.get("recovery", {})
    history = _history(record, task)
    facts = model_facts(record)
    everything: list[AttemptRecord] = [attempt for other in record.tasks for attempt in other.attempts]
    profile = choose_profile(
        settings.get("profile", "auto"), model_bytes=int(facts.get("model_bytes", 0)), history=everything
    )
    following = None
    if record.state is ExportState.RUNNING and task.attempt.rule == PRECEDENT and is_lasting(failure):
        following = return_to_plan(task, rules=rules)
    elif record.state is ExportState.RUNNING:
        # If an attempt that replaces a rejected output fails itself, the next way to replace that output is taken.
        earlier = [attempt.failure for attempt in history if attempt.failure and attempt.failure.reason == REJECTED]
        for cause in (failure, *earlier[-1:]):
            following = following or recover(
                cause,
                task.stage,
                params=task.attempt.params,
                history=history,
                profile=profile,
                facts=facts,
                max_attempts=settings.get("max_attempts", 6),
                alone=alone,
                reserve=task.reserve,
                delivers=partial(_format_at, record, task),
                table=rules,
            )
    final = with_guidance(failure, task.stage, attempts=len(history), table=rules)
    return {
        "profile": profile.value,
        "next": None if following is None else following.model_dump(mode="json", exclude_defaults=True),
        "failure": final.to_json(),
    }


def _history(record: ExportRecord, task: TaskRecord) -> list[AttemptRecord]:
    """Return the attempts of this run that recovery counts.

    The attempt of a precedent does not count, nor do attempts before a successful task ran again with new inputs. If none is left, the last
    attempt of an earlier run counts: its output is rejected only now.
    """
    history: list[AttemptRecord] = []
    for attempt in task.attempts:
        if attempt.run == record.run and attempt.rule != PRECEDENT:
            history = [attempt] if attempt.rule == AGAIN else [*history, attempt]
    return history or [attempt for attempt in task.attempts[-1:] if attempt.run != record.run]


def _format_at(record: ExportRecord, task: TaskRecord, level: str) -> str:
    """Return the format of a task's output at another level; empty if there is none, or another task delivers it."""
    name, _ = split_output(task.format)
    known = formats().get(name)
    wanted = known.output_name(level) if known is not None and task.format else ""
    taken = {each.format for each in record.tasks if each.id != task.id}
    return "" if wanted in taken else wanted


def fault(error: Exception) -> Failure:
    """Return the failure of an export that was ended by a fault in the coordinator."""
    if isinstance(error, ModelExportError):
        return error.failure()
    return ServiceError(
        f"the coordinator failed: {type(error).__name__}: {error}", reason="INTERNAL", remedy="retry the export"
    ).failure()


def model_facts(record: ExportRecord) -> dict[str, Any]:
    """Return facts about the model: those that finished tasks recorded, and ``model_bytes``, the size of the merged weights."""
    facts: dict[str, Any] = {}
    for task in record.tasks:
        facts |= {name: value for name, value in task.facts.items() if isinstance(value, str | int | float)}
        if plays(task.stage, Role.PREPARATION, Role.MERGE) and not is_part(task.params):
            facts["model_bytes"] = task.facts.get("output_bytes", 0)
    return facts


def _apply_decision(record: ExportRecord, task: TaskRecord, decision: dict[str, Any]) -> ExportRecord:
    record = record.with_(recovery_profile=decision["profile"])
    if decision["next"] is not None:
        following = NextAttempt.model_validate(decision["next"])
        return transitions.retry(record, task.id, following, now=decision["time"])
    failure = Failure.from_json(decision["failure"])
    return transitions.give_up(record, task.id, failure, now=decision["time"])
