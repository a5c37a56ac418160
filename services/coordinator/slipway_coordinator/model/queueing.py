"""Queue attempts of tasks: the next one after a decision, one again because inputs were made again, under another format; end tasks unbegun. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slipway.planning.references import VALIDATION, producers
from slipway.validation.inputs import input_of, output_of
from slipway_coordinator.model.records import AttemptRecord, ExportRecord, Resources, TaskRecord
from slipway_coordinator.model.recovery import NextAttempt
from slipway_coordinator.model.states import TaskState

AGAIN = "outputs-made-again"
"""Name of the rule by which a task that succeeded runs again."""


def queue_next(record: ExportRecord, task: TaskRecord, following: NextAttempt, *, now: float) -> ExportRecord:
    """Queue a decided attempt; if its output is delivered as another format, tell the tasks that use it."""
    queued = queue_attempt(
        record,
        task,
        params=following.params,
        inputs={name: digest for name, digest in task.attempt.inputs.items() if name not in following.without},
        resources=following.resources,
        rule=following.rule,
        note=following.note,
    )
    queued = queued.with_attempt(
        not_before=now + following.wait_seconds if following.wait_seconds else 0.0,
        avoid=failed_on(record, task) if following.elsewhere else (),
    )
    record = record.replacing(queued)
    if following.reserve:
        record = _give_reserve(record, queued, following.reserve)
    return deliver_as(record, record.task(task.id), following.format) if following.format else record


def _give_reserve(record: ExportRecord, task: TaskRecord, names: Collection[str]) -> ExportRecord:
    """Let a queued attempt wait for inputs that the plan keeps in reserve, and let the tasks that make them run."""
    given = {name: task.reserve[name] for name in names}
    waiting = task.moved(TaskState.WAITING, inputs={**task.inputs, **given}).with_attempt(state=TaskState.WAITING)
    record, needed = record.replacing(waiting), list(producers(given))
    while needed:
        producer = record.task(needed.pop())
        if producer.state is TaskState.SKIPPED:
            record = record.replacing(producer.moved(TaskState.WAITING))
            needed += producers(producer.inputs)
    return record


def queue_waiting(task: TaskRecord, inputs: Mapping[str, str]) -> TaskRecord:
    """Queue the attempt that waited for inputs in reserve, with those that were made."""
    made = {name: digest for name, digest in inputs.items() if name in task.reserve}
    return task.moved(TaskState.QUEUED).with_attempt(state=TaskState.QUEUED, inputs={**task.attempt.inputs, **made})


def deliver_as(record: ExportRecord, task: TaskRecord, delivered: str) -> ExportRecord:
    """Deliver a task's output as another format, or again as the one of the plan; tasks that use it know it by that name."""
    asked = task.requested or task.format
    record = record.replacing(task.with_(format=delivered, requested="" if delivered == asked else asked))
    for user in record.tasks:
        known = input_of(task.format)
        if known in user.inputs and task.id in producers({"": user.inputs[known]}):
            inputs = {input_of(delivered) if name == known else name: source for name, source in user.inputs.items()}
            record = record.replacing(user.with_(inputs=inputs))
    return record


def queue_again(record: ExportRecord, task: TaskRecord, inputs: dict[str, str]) -> TaskRecord:
    """Queue a task that succeeded, because inputs were made again. A validation only judges those, and keeps its other verdicts."""
    last = task.attempt
    params, given = last.params, inputs
    if task.format == VALIDATION:
        params = {
            **params,
            "again": sorted(output_of(name) for name in inputs if last.inputs.get(name) != inputs[name]),
        }
        given = {**inputs, "before": next(iter(task.outputs.values()))}
    note = "again, because outputs that it uses were made again"
    return queue_attempt(record, task, params=params, inputs=given, resources=last.resources, rule=AGAIN, note=note)


def queue_attempt(
    record: ExportRecord,
    task: TaskRecord,
    *,
    params: dict[str, Any] | None = None,
    inputs: dict[str, str] | None = None,
    resources: Resources | None = None,
    rule: str = "",
    note: str = "",
) -> TaskRecord:
    """Return a task with another attempt queued; unless given, with the plan's parameters and the inputs of the attempt before."""
    attempt = AttemptRecord(
        number=len(task.attempts) + 1,
        run=record.run,
        state=TaskState.QUEUED,
        params=task.params if params is None else params,
        inputs=task.attempt.inputs if inputs is None else inputs,
        resources=resources or Resources(),
        rule=rule,
        note=note,
    )
    return task.moved(TaskState.QUEUED, attempts=(*task.attempts, attempt))


def end_unbegun(task: TaskRecord, end: TaskState, now: float) -> TaskRecord:
    """Return a task that is cancelled or skipped before it began; its attempt, if it has one, is cancelled."""
    changed = task.moved(end)
    if task.attempts and not task.attempt.state.ended:
        changed = changed.with_attempt(state=TaskState.CANCELLED, end_time=now)
    return changed


def failed_on(record: ExportRecord, task: TaskRecord) -> tuple[str, ...]:
    """Return the workers on which the task failed in this run for the same reason as last time."""
    failed = [attempt for attempt in task.attempts if attempt.run == record.run and attempt.failure is not None]
    reason = failed[-1].failure.reason if failed and failed[-1].failure else ""
    same = [attempt.worker for attempt in failed if attempt.failure is not None and attempt.failure.reason == reason]
    return tuple(sorted({worker for worker in same if worker}))
