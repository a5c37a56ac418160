"""The durable workflow of one export: what happened comes in as messages, one step per decision, replayed after a crash.

Everything that happens to an export (a lease, a result, a cancellation) is an event in its inbox. The workflow holds the export
as a record, applies pure functions to it, and shows new records to the rest of the process. The inbox is durable and gives the
same events in the same order when a workflow is replayed, so reading it is no step. Decisions that could come out otherwise
after a restart (the recovery table, the clock) are steps, whose results are stored. Revisions count what happened, so they do
not depend on how many events are shown at once. A stage's failure is a value in an event, never an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dbos import DBOS

from slipway.errors import Failure, ModelExportError, ServiceError
from slipway.observability.telemetry import within
from slipway.registry import plays
from slipway.stage import Role
from slipway_coordinator.model import transitions as graph
from slipway_coordinator.model.records import AttemptRecord, ExportRecord, TaskRecord
from slipway_coordinator.model.recovery import NextAttempt, RuleTable, choose_profile, recover, with_guidance
from slipway_coordinator.model.states import ExportState
from slipway_coordinator.storage.inbox import Message

log = logging.getLogger("slipway.coordinator.workflow")


class Change(NamedTuple):
    """A step of an export, at a time in seconds since the epoch; ``before`` is None at the beginning of a run."""

    before: ExportRecord | None
    after: ExportRecord
    at: float


class Surroundings(Protocol):
    """What a workflow needs from the process it runs in."""

    rules: RuleTable
    alone: bool

    def entered(self, task: asyncio.Task[Any] | None) -> None:
        """Note the asyncio task that carries out a workflow, so that it can be stopped with the process."""

    async def events(self, record: ExportRecord, *, after: int) -> list[Message]:
        """What happened in this run after the event of this number, once there is something."""

    async def show(self, record: ExportRecord, changes: Sequence[Change]) -> None:
        """Store a new revision, tell those who watch, and offer what shall run. Harmless to repeat.

        Args:
            record: The new revision.
            changes: What led to it from the one shown before, in order; nothing when it was stored before.
        """

    async def stop_on_fault(self, name: str, failure: Failure) -> None:
        """End an export that the coordinator itself cannot go on with."""


@dataclass
class _Current:
    surroundings: Surroundings | None = None


# DBOS itself is one per process, and calls workflows by name after a restart: this is how they find the process around them.
_current = _Current()


def install(surroundings: Surroundings | None) -> None:
    """Say what the workflows of this process run in; None when it shuts down.

    Raises:
        ServiceError: reason ``COORDINATOR_LOCKED`` when this process runs a coordinator already.
    """
    if surroundings is not None and _current.surroundings is not None:
        raise ServiceError(
            "this process runs a coordinator already",
            reason="COORDINATOR_LOCKED",
            remedy="end it first, or start a process",
        )
    _current.surroundings = surroundings


def _surroundings() -> Surroundings:
    if _current.surroundings is None:
        raise ServiceError("the coordinator is not running", reason="COORDINATOR_UNAVAILABLE")
    return _current.surroundings


@DBOS.workflow(name="slipway.export", max_recovery_attempts=None)
async def export_workflow(record_json: dict[str, Any], now: float) -> str:
    """Carry out a run of an export: from its beginning, or from where another version left it; returns the state it ended in.

    Args:
        record_json: The export as it was stored when this workflow was started.
        now: When that was, in seconds since the epoch.
    """
    _surroundings().entered(asyncio.current_task())
    record = ExportRecord.from_json(record_json)
    try:
        with within(record.traceparent):
            return await _carry_out(record, now)
    except Exception as error:
        log.exception(f"{record.name} stopped on a fault of the coordinator")
        await _surroundings().stop_on_fault(record.name, fault(error))
        return ExportState.FAILED.value


async def _carry_out(record: ExportRecord, now: float) -> str:
    changes = []
    if record.state is ExportState.QUEUED:
        record = graph.begin(record, now=now).with_(revision=record.revision + 1)
        changes.append(Change(None, record, now))
    while True:
        await _surroundings().show(record, changes)
        if record.state.ended:
            return record.state.value
        changes = []
        for message in await _surroundings().events(record, after=record.events_read):
            before = record
            record = graph.apply(record, message.event)
            for task in graph.undecided(record):
                record = _apply_decision(record, task, await _decide(record.to_json(), task.id))
            record = record.with_(revision=before.revision + 1, events_read=message.number)
            changes.append(Change(before, record, message.event.time))
            if record.state.ended:
                break


@DBOS.step(name="slipway.decide")
async def _decide(record_json: dict[str, Any], task_id: str) -> dict[str, Any]:
    record, around = ExportRecord.from_json(record_json), _surroundings()
    return decide(record, record.task(task_id), rules=around.rules, alone=around.alone) | {"time": time.time()}


def decide(record: ExportRecord, task: TaskRecord, *, rules: RuleTable, alone: bool) -> dict[str, Any]:
    """What to do about a failed attempt: ``next`` attempt or None, and the final ``failure`` with guidance."""
    failure = task.attempt.failure
    assert failure is not None
    settings = record.configuration.get("recovery", {})
    history = [attempt for attempt in task.attempts if attempt.run == record.run]
    facts = model_facts(record)
    everything: list[AttemptRecord] = [attempt for other in record.tasks for attempt in other.attempts]
    profile = choose_profile(
        settings.get("profile", "auto"), model_bytes=int(facts.get("model_bytes", 0)), history=everything
    )
    following = None
    if record.state is ExportState.RUNNING:
        following = recover(
            failure,
            task.stage,
            params=task.attempt.params,
            history=history,
            profile=profile,
            facts=facts,
            max_attempts=settings.get("max_attempts", 5),
            alone=alone,
            table=rules,
        )
    final = with_guidance(failure, task.stage, attempts=len(history), table=rules)
    return {
        "profile": profile.value,
        "next": None if following is None else following.model_dump(mode="json"),
        "failure": final.to_json(),
    }


def fault(error: Exception) -> Failure:
    """The failure of an export that a fault in the coordinator ended."""
    if isinstance(error, ModelExportError):
        return error.failure()
    return ServiceError(
        f"the coordinator failed: {type(error).__name__}: {error}", reason="INTERNAL", remedy="retry the export"
    ).failure()


def model_facts(record: ExportRecord) -> dict[str, Any]:
    """What is known about the model: what finished tasks recorded, and ``model_bytes``, the size of the merged weights."""
    facts: dict[str, Any] = {}
    for task in record.tasks:
        facts |= {name: value for name, value in task.facts.items() if isinstance(value, str | int | float)}
        if plays(task.stage, Role.PREPARATION, Role.MERGE):
            facts["model_bytes"] = task.facts.get("output_bytes", 0)
    return facts


def _apply_decision(record: ExportRecord, task: TaskRecord, decision: dict[str, Any]) -> ExportRecord:
    record = record.with_(recovery_profile=decision["profile"])
    if decision["next"] is not None:
        following = NextAttempt.model_validate(decision["next"])
        return graph.retry(record, task.id, following, now=decision["time"])
    failure = Failure.from_json(decision["failure"])
    return graph.give_up(record, task.id, failure, now=decision["time"])
