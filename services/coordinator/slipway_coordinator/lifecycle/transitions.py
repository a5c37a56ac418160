"""The state machine of an export: pure functions from a record and an event to the next record.

Events arrive in one ordered stream. Applying the same stream gives the same records, so a restarted coordinator can replay an
export. Events about an attempt that is no longer the current one change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slipway.errors import Failure, StageError
from slipway.execution.memory_curve import MemoryOverTime
from slipway.planning.precedents import PRECEDENT, Precedent
from slipway.planning.references import producers
from slipway.registry import IMPORT
from slipway.validation.findings import failure_prefix
from slipway_coordinator.lifecycle.importing import check_outputs, check_texts, with_sources
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskRecord, TaskState
from slipway_coordinator.lifecycle.recovery import NextAttempt
from slipway_coordinator.lifecycle.scheduling import advance, deliver_as, end_unbegun, queue_attempt, queue_next

MOST_LOSSES = 5
"""Workers in a row that may fall silent on one attempt before it fails: enough for a few bad machines, too few to wear out a cluster."""

MOST_DEPARTURES = 50
"""The same for workers that had reported their shutdown, which happens on spot nodes every few hours. It is limited too, because the
task itself may be the cause of its pod's eviction."""


class EventKind(StrEnum):
    """Kinds of events that change an export from outside."""

    LEASED = "leased"
    LEASE_LOST = "lease_lost"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel_requested"


class Event(BaseModel):
    """One event at ``time`` (seconds since the epoch).

    All kinds but ``CANCEL_REQUESTED`` concern one attempt. ``departed``, with ``LEASE_LOST``: the worker had reported its
    shutdown before it fell silent.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: EventKind
    time: float
    task: str = ""
    attempt: int = 0
    worker: str = ""
    epoch: int = 0
    outputs: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, Any] = Field(default_factory=dict)
    reused: bool = False
    failure: Failure | None = None
    peak_memory_bytes: int = 0
    memory: MemoryOverTime = MemoryOverTime()
    departed: bool = False


def begin(record: ExportRecord, *, now: float) -> ExportRecord:
    """Start a run: queue every task that can start."""
    return advance(record.move_to(ExportState.RUNNING, begin_time=now), now=now)


def apply(record: ExportRecord, event: Event) -> ExportRecord:
    """Return the export after an event. A task whose attempt failed stays RUNNING until :func:`retry` or :func:`give_up`."""
    if event.kind is EventKind.CANCEL_REQUESTED:
        return cancel(record, now=event.time)
    task = next((task for task in record.tasks if task.id == event.task), None)
    if task is None or not task.attempts or task.attempt.number != event.attempt or task.attempt.state.ended:
        return record
    event = _check_import(record, task, event)
    match event.kind:
        case EventKind.LEASED:
            last = task.attempt
            adopted = event.epoch == last.epoch  # its worker was alive, only silent
            changed = task.move_to(TaskState.RUNNING).with_attempt(
                state=TaskState.RUNNING,
                worker=event.worker,
                epoch=event.epoch,
                lost_epoch=last.epoch if not adopted else last.lost_epoch,
                losses=max(last.losses - adopted, 0),
                departures=max(last.departures - (adopted and not last.losses), 0),
                start_time=event.time,
            )
        case EventKind.LEASE_LOST:
            changed = _requeue_or_fail(task, event)
        case EventKind.SUCCEEDED:
            record = _record_success(record, task, event)
            changed = record.task(task.id)
        case EventKind.FAILED:
            changed = task.move_to(TaskState.RUNNING).with_attempt(
                state=TaskState.FAILED,
                failure=event.failure,
                end_time=event.time,
                peak_memory_bytes=event.peak_memory_bytes,
                memory=event.memory,
            )
        case EventKind.CANCELLED if record.state is ExportState.CANCELLING:
            changed = task.move_to(TaskState.CANCELLED).with_attempt(state=TaskState.CANCELLED, end_time=event.time)
        case _:  # a worker that shuts down returns its task
            changed = task.move_to(TaskState.QUEUED).with_attempt(state=TaskState.QUEUED)
    record = record.with_task(changed)
    if record.state is ExportState.CANCELLING:  # this task may be queued again, and an import may have added tasks
        record = _cancel_waiting(record, event.time)
    return advance(record, now=event.time)


def completes_plan(record: ExportRecord, event: Event) -> bool:
    """Return whether an event adds the tasks that could not be planned before the import of the sources."""
    (first, *others) = record.tasks
    return not others and first.stage == IMPORT and event.kind is EventKind.SUCCEEDED


def _check_import(record: ExportRecord, task: TaskRecord, event: Event) -> Event:
    """Return the event, or a failure in its place if an import succeeded with the wrong result."""
    if event.kind is not EventKind.SUCCEEDED or task.stage != IMPORT:
        return event
    failure = check_outputs(task, event.outputs, event.facts) or check_texts(record, event.outputs)
    return event if failure is None else event.model_copy(update={"kind": EventKind.FAILED, "failure": failure})


def _requeue_or_fail(task: TaskRecord, event: Event) -> TaskRecord:
    """Requeue a lost task; fail it after ``MOST_LOSSES`` losses or ``MOST_DEPARTURES`` departures in a row."""
    last = task.attempt
    ran = last.state is TaskState.RUNNING
    losses, departures = last.losses + (ran and not event.departed), last.departures + (ran and event.departed)
    if losses < MOST_LOSSES and departures < MOST_DEPARTURES:
        return task.move_to(TaskState.QUEUED).with_attempt(state=TaskState.QUEUED, losses=losses, departures=departures)
    failure = StageError(
        f"{losses + departures} workers in a row fell silent while they ran {task.stage}, the last one {last.worker}",
        reason="STAGE_KILLED",
        about={"worker": last.worker, "losses": losses, "departures": departures},
    ).failure()
    return task.move_to(TaskState.RUNNING).with_attempt(
        state=TaskState.FAILED, failure=failure, losses=losses, departures=departures, end_time=event.time
    )


def undecided_tasks(record: ExportRecord) -> tuple[TaskRecord, ...]:
    """Return the tasks whose latest attempt failed and still needs a decision."""
    return tuple(
        task for task in record.tasks if task.state is TaskState.RUNNING and task.attempt.state is TaskState.FAILED
    )


def beginning_tasks(record: ExportRecord) -> tuple[TaskRecord, ...]:
    """Return the tasks that are queued for the first time, before a precedent was looked for."""
    return tuple(
        task
        for task in record.tasks
        if task.open and task.precedent is None and task.state is TaskState.QUEUED and len(task.attempts) == 1
    )


def begin_with(record: ExportRecord, task_id: str, key: str, precedent: Precedent | None) -> ExportRecord:
    """Record the key of a task's precedents, and begin with a precedent if there is one.

    Args:
        record: The export.
        task_id: One of :func:`beginning_tasks`.
        key: The key; empty for none.
        precedent: The parameters that worked before; None for the planned parameters.
    """
    task = record.task(task_id).with_(precedent=key)
    if precedent is None:
        return record.with_task(task)
    params = {**task.params, **precedent.params}
    begun = task.with_attempt(params=params, rule=PRECEDENT, note=precedent.note)
    return record.with_task(begun).with_(warnings=_merge_warnings(record.warnings, precedent.warnings))


def make_again(record: ExportRecord, event: Event, decided: Mapping[str, tuple[Failure, NextAttempt]]) -> ExportRecord:
    """Apply the success of a validation that some outputs failed: make these again, and then run the tasks that use them again.

    Args:
        record: The export.
        event: The validation's success.
        decided: The failure and the next attempt of each task whose output failed.
    """
    task = record.task(event.task)
    record = _record_success(record, task, event)
    failed = tuple(failure_prefix(failure.about.get("output", "")) for failure, _ in decided.values())
    record = record.with_(warnings=tuple(each for each in record.warnings if not each.startswith(failed)))
    for task_id, (failure, following) in decided.items():
        made = record.task(task_id).with_attempt(state=TaskState.FAILED, failure=failure)
        record = _with_warnings(record.with_task(made), following)
        record = queue_next(record, made, following, now=event.time)
    remade = set(decided)
    for user in record.tasks:  # producers come before consumers
        if user.state is TaskState.SUCCEEDED and set(producers(user.inputs)) & remade:
            record = record.with_task(user.move_to(TaskState.WAITING))
            remade.add(user.id)
    return advance(record, now=event.time)


def retry(record: ExportRecord, task_id: str, following: NextAttempt, *, now: float) -> ExportRecord:
    """Queue another attempt of a task that failed, or make its inputs again first."""
    task = record.task(task_id)
    record = _with_warnings(record, following)
    if following.remake_inputs:
        repeated = _producers_to_repeat(record, task)
        for producer in repeated:
            last = producer.attempt
            again = queue_attempt(
                record,
                producer,
                params=producer.params if producer.stage == IMPORT else last.params,
                resources=last.resources,
                rule=following.rule,
                note=following.note,
            )
            record = record.with_task(again)
        if repeated:
            return record.with_task(task.move_to(TaskState.WAITING))
    return advance(queue_next(record, task, following, now=now), now=now)


def give_up(record: ExportRecord, task_id: str, failure: Failure, *, now: float) -> ExportRecord:
    """Make a task's failure final. Independent branches continue; the deciding failure becomes the export's.

    If others can run without the task's output, its failure becomes a warning instead. Which of several failures decides depends
    neither on the order in which they happened nor on the number of workers.
    """
    task = record.task(task_id)
    end = TaskState.CANCELLED if record.state is ExportState.CANCELLING else TaskState.FAILED
    changed = record.with_task(task.move_to(end).with_attempt(failure=failure))
    if end is TaskState.FAILED and task.fallback:
        warning = f"{task.id}: it failed, so {task.fallback} ({failure.reason}: {failure.message})"
        changed = changed.with_(warnings=_merge_warnings(changed.warnings, (warning,)))
    elif end is TaskState.FAILED:
        final = (each.attempt.failure for each in changed.tasks if each.state is TaskState.FAILED and not each.fallback)
        changed = changed.with_(failure=Failure.deciding(each for each in final if each is not None))
    return advance(changed, now=now)


def cancel(record: ExportRecord, *, now: float) -> ExportRecord:
    """Begin to cancel: cancel waiting tasks now; running ones are ended by their workers."""
    if record.state.ended or record.state is ExportState.CANCELLING:
        return record
    return advance(_cancel_waiting(record.move_to(ExportState.CANCELLING), now), now=now)


def stop(record: ExportRecord, failure: Failure, *, now: float) -> ExportRecord:
    """End an export at once, for a failure outside its tasks; it can be retried."""
    for task in record.tasks:
        if not task.state.ended:
            record = record.with_task(end_unbegun(task, TaskState.CANCELLED, now))
    return record.with_(state=ExportState.FAILED, failure=failure, end_time=now)


def restart(record: ExportRecord) -> ExportRecord:
    """Return an ended export ready for another run. Finished tasks are kept unless their inputs will be made again."""
    again: set[str] = set()
    for task in record.tasks:  # producers come before consumers
        stale = any(producer in again for producer in producers(task.inputs))
        if task.state is not TaskState.SUCCEEDED or stale:
            again.add(task.id)
            current = record.task(task.id)
            planned = {name: source for name, source in current.inputs.items() if name not in task.reserve}
            current = current.move_to(TaskState.WAITING, outputs={}, facts={}, inputs=planned)
            record = record.with_task(current)
            if current.requested:
                record = deliver_as(record, current, current.requested)
    return record.move_to(ExportState.QUEUED, run=record.run + 1, events_read=0, failure=None, end_time=None)


def _record_success(record: ExportRecord, task: TaskRecord, event: Event) -> ExportRecord:
    done = task.move_to(TaskState.SUCCEEDED, outputs=event.outputs, facts=event.facts).with_attempt(
        state=TaskState.SUCCEEDED,
        end_time=event.time,
        start_time=task.attempt.start_time or event.time,
        reused=event.reused,
        peak_memory_bytes=event.peak_memory_bytes,
        memory=event.memory,
    )
    record = record.with_(warnings=_merge_warnings(record.warnings, event.facts.get("warnings", ())))
    return with_sources(record, done) if task.stage == IMPORT else record.with_task(done)


def _cancel_waiting(record: ExportRecord, now: float) -> ExportRecord:
    """Cancel the tasks that have not begun."""
    for task in record.tasks:
        if task.state in {TaskState.WAITING, TaskState.QUEUED}:
            record = record.with_task(end_unbegun(task, TaskState.CANCELLED, now))
    return record


def _producers_to_repeat(record: ExportRecord, task: TaskRecord) -> list[TaskRecord]:
    """Return the finished tasks that made the artifact named by the failure, or all producers of inputs if it names none of theirs."""
    failure = task.attempt.failure
    named = failure.about.get("digest", "") if failure else ""
    finished = [each for each in map(record.task, producers(task.inputs)) if each.state is TaskState.SUCCEEDED]
    return [each for each in finished if named in each.outputs.values()] or finished


def _with_warnings(record: ExportRecord, following: NextAttempt) -> ExportRecord:
    """Add the warning of a decided attempt, and withdraw those that no longer hold."""
    kept = tuple(warning for warning in record.warnings if warning not in following.withdrawn)
    new = (following.warning,) if following.warning else ()
    return record.with_(warnings=_merge_warnings(kept, new))


def _merge_warnings(old: tuple[str, ...], new: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*old, *new)))
