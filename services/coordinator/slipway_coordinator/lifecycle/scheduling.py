"""Decide which tasks of an export begin, wait or are skipped, queue their attempts, and decide when the export ends. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from slipway.division import is_join, undivided
from slipway.errors import Failure, StageError
from slipway.planning.references import VALIDATION, Source, parse_reference, producers
from slipway.validation.inputs import input_of, output_of
from slipway_coordinator.lifecycle.records import (
    AttemptRecord,
    ExportRecord,
    ExportState,
    Resources,
    TaskRecord,
    TaskState,
)
from slipway_coordinator.lifecycle.recovery import NextAttempt

AGAIN = "outputs-made-again"
"""Name of the rule by which a task that succeeded runs again."""


def advance(record: ExportRecord, *, now: float) -> ExportRecord:
    """Queue every task whose inputs exist, skip those that cannot run or that nobody needs, and end the export after the last task."""
    while True:
        for task in record.tasks:
            following = task
            if task.state in {TaskState.WAITING, TaskState.QUEUED} and _is_unused(record, task):
                following = end_unbegun(task, TaskState.SKIPPED, now)
            elif task.state is TaskState.WAITING:
                following = _queue_or_skip(record, task, now)
            if following is not task:
                record = record.with_task(following)
                break
        else:
            break
    if record.state is ExportState.QUEUED or record.state.ended or not all(task.state.ended for task in record.tasks):
        return record
    record = record.move_to(_end_state(record), end_time=now)
    if record.state is ExportState.FAILED and record.failure is None:
        record = record.with_(failure=_missing_outputs(record))
    return record


def _missing_outputs(record: ExportRecord) -> Failure:
    """Return the failure of an export in which no task failed: some were skipped because other tasks lack an output they need."""
    skipped = [task.id for task in record.tasks if task.state is TaskState.SKIPPED]
    return StageError(
        f"{', '.join(skipped)} cannot run: earlier tasks made other outputs than planned",
        reason="RESULT_INVALID",
    ).failure()


def _end_state(record: ExportRecord) -> ExportState:
    if all(task.state is TaskState.SUCCEEDED or _is_dispensable(record, task) for task in record.tasks):
        return ExportState.SUCCEEDED
    return ExportState.CANCELLED if record.state is ExportState.CANCELLING else ExportState.FAILED


def _is_unused(record: ExportRecord, task: TaskRecord) -> bool:
    """Return whether no task needs this one: it delivers nothing, and its users have ended, or it is in reserve and not yet requested."""
    users = [each for each in record.tasks if task.id in producers(each.inputs)]
    in_reserve = any(task.id in producers(each.reserve) for each in record.tasks)
    return not task.format and (bool(users) or in_reserve) and all(user.state.ended for user in users)


class _Inputs(NamedTuple):
    """Inputs of a task: digests by name, whether some are still to come (``open``), and whether it can never run (``lacking``)."""

    digests: dict[str, str]
    open: bool
    lacking: bool


def _queue_or_skip(record: ExportRecord, task: TaskRecord, now: float) -> TaskRecord:
    """Return the task queued with its inputs, skipped as soon as it cannot run, or unchanged while it must wait."""
    inputs = _inputs(record, task)
    if inputs.lacking:
        return end_unbegun(task, TaskState.SKIPPED, now)
    if inputs.open:
        return task
    if task.attempts and task.attempt.state is TaskState.WAITING:
        return queue_waiting(task, inputs.digests)
    if task.attempts and task.attempt.state is TaskState.SUCCEEDED and task.attempt.run == record.run:
        return queue_again(record, task, inputs.digests)
    if task.attempts and task.attempt.state is TaskState.FAILED and task.attempt.run == record.run:
        last = task.attempt  # it waited for inputs to be made again
        return queue_attempt(
            record, task, params=last.params, inputs=inputs.digests, resources=last.resources, rule="inputs-again"
        )
    return queue_attempt(record, task, inputs=inputs.digests)


def _inputs(record: ExportRecord, task: TaskRecord) -> _Inputs:
    """Gather a task's inputs. A partial task needs at least one of the delivered formats, and all its other inputs."""
    digests: dict[str, str] = {}
    unended: list[TaskRecord] = []
    lost = made = lacking = False
    for name, reference in task.inputs.items():
        source = parse_reference(reference)
        if isinstance(source, Source):
            digests[name] = record.sources[source.name]
            continue
        producer = record.task(source.task)
        if not producer.state.ended:
            unended.append(producer)
        elif producer.state is TaskState.SUCCEEDED and source.name in producer.outputs:
            digests[name] = producer.outputs[source.name]
            made |= bool(producer.format)
        elif task.partial and producer.format:
            lost = True
        elif task.fallback or not _is_dispensable(record, producer):  # a task with a fallback needs all its own inputs
            lacking = True
    without_formats = lost and not made and not any(each.format for each in unended)
    return _Inputs(digests, open=bool(unended), lacking=lacking or without_formats)


def _is_dispensable(record: ExportRecord, task: TaskRecord) -> bool:
    """Return whether others can run without this task's output: it has a fallback, and failed or was skipped after such a failure."""
    if not task.fallback or task.state is not TaskState.SKIPPED:
        return bool(task.fallback) and task.state is TaskState.FAILED
    missing = [each for each in map(record.task, producers(task.inputs)) if each.state is not TaskState.SUCCEEDED]
    return all(_is_dispensable(record, each) for each in missing)


def queue_next(record: ExportRecord, task: TaskRecord, following: NextAttempt, *, now: float) -> ExportRecord:
    """Queue a decided attempt; if its output is delivered as another format, tell the tasks that use it."""
    inputs, params = task.attempt.inputs, following.params
    if is_join(task.params) and _changes_output(task, following):
        task, inputs = _undivide(record, task)
        params = undivided(params)
    queued = queue_attempt(
        record,
        task,
        params=params,
        inputs={name: digest for name, digest in inputs.items() if name not in following.without},
        resources=following.resources,
        rule=following.rule,
        note=following.note,
    )
    queued = queued.with_attempt(
        not_before=now + following.wait_seconds if following.wait_seconds else 0.0,
        avoid=find_failed_workers(record, task) if following.elsewhere else (),
    )
    record = record.with_task(queued)
    if following.reserve:
        record = _give_reserve(record, queued, following.reserve)
    return deliver_as(record, record.task(task.id), following.format) if following.format else record


def _changes_output(task: TaskRecord, following: NextAttempt) -> bool:
    """Return whether an attempt makes something else than the parts that its task joins."""
    changed = following.params != task.attempt.params
    return following.whole or changed or bool(following.reserve or following.without or following.format)


def _undivide(record: ExportRecord, task: TaskRecord) -> tuple[TaskRecord, dict[str, str]]:
    """Return a task that joined parts as one that does the whole work, and its inputs, which are those of each part."""
    part = record.task(producers(task.inputs)[0])
    return task.with_(params=undivided(task.params), inputs=part.inputs), part.attempt.inputs


def _give_reserve(record: ExportRecord, task: TaskRecord, names: Collection[str]) -> ExportRecord:
    """Make a queued attempt wait for inputs in the plan's reserve, and start the tasks that make them."""
    given = {name: task.reserve[name] for name in names}
    waiting = task.move_to(TaskState.WAITING, inputs={**task.inputs, **given}).with_attempt(state=TaskState.WAITING)
    record, needed = record.with_task(waiting), list(producers(given))
    while needed:
        producer = record.task(needed.pop())
        if producer.state is TaskState.SKIPPED:
            record = record.with_task(producer.move_to(TaskState.WAITING))
            needed += producers(producer.inputs)
    return record


def queue_waiting(task: TaskRecord, inputs: Mapping[str, str]) -> TaskRecord:
    """Queue the attempt that waited for inputs in reserve, now that they are made."""
    made = {name: digest for name, digest in inputs.items() if name in task.reserve}
    return task.move_to(TaskState.QUEUED).with_attempt(state=TaskState.QUEUED, inputs={**task.attempt.inputs, **made})


def deliver_as(record: ExportRecord, task: TaskRecord, delivered: str) -> ExportRecord:
    """Deliver a task's output as another format, or as the planned one again; rename it in the inputs of the tasks that use it."""
    asked = task.requested or task.format
    record = record.with_task(task.with_(format=delivered, requested="" if delivered == asked else asked))
    for user in record.tasks:
        known = input_of(task.format)
        if known in user.inputs and task.id in producers({"": user.inputs[known]}):
            inputs = {input_of(delivered) if name == known else name: source for name, source in user.inputs.items()}
            record = record.with_task(user.with_(inputs=inputs))
    return record


def queue_again(record: ExportRecord, task: TaskRecord, inputs: dict[str, str]) -> TaskRecord:
    """Queue a task that succeeded, because inputs were made again. A validation judges only those, and keeps its other verdicts."""
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
    """Return a task with another attempt queued, by default with the planned parameters and the previous attempt's inputs."""
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
    return task.move_to(TaskState.QUEUED, attempts=(*task.attempts, attempt))


def end_unbegun(task: TaskRecord, end: TaskState, now: float) -> TaskRecord:
    """Return a task that is cancelled or skipped before it began; its attempt, if it has one, is cancelled."""
    changed = task.move_to(end)
    if task.attempts and not task.attempt.state.ended:
        changed = changed.with_attempt(state=TaskState.CANCELLED, end_time=now)
    return changed


def find_failed_workers(record: ExportRecord, task: TaskRecord) -> tuple[str, ...]:
    """Return the workers on which the task failed in this run for the same reason as last time."""
    failed = [attempt for attempt in task.attempts if attempt.run == record.run and attempt.failure is not None]
    reason = failed[-1].failure.reason if failed and failed[-1].failure else ""
    same = [attempt.worker for attempt in failed if attempt.failure is not None and attempt.failure.reason == reason]
    return tuple(sorted({worker for worker in same if worker}))
