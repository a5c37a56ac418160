"""Decide which tasks of an export begin, wait or are skipped, and when the export ends. Pure."""

from __future__ import annotations

from typing import NamedTuple

from slipway.errors import Failure, StageError
from slipway.planning.references import Source, parse_reference, producers
from slipway_coordinator.model.queueing import end_unbegun, queue_again, queue_attempt, queue_waiting
from slipway_coordinator.model.records import ExportRecord, TaskRecord
from slipway_coordinator.model.states import ExportState, TaskState


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
                record = record.replacing(following)
                break
        else:
            break
    if record.state is ExportState.QUEUED or record.state.ended or not all(task.state.ended for task in record.tasks):
        return record
    record = record.moved(_end_state(record), end_time=now)
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
    """Return whether a task works for others only, all of which have ended, or in reserve for others, none of which asked for it yet."""
    users = [each for each in record.tasks if task.id in producers(each.inputs)]
    in_reserve = any(task.id in producers(each.reserve) for each in record.tasks)
    return not task.format and (bool(users) or in_reserve) and all(user.state.ended for user in users)


class _Inputs(NamedTuple):
    """What a task is given: digests by input, whether some are still to come, and whether it will never have what it needs."""

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
    """Gather what a task is given. A partial task runs without some of the delivered formats, but needs one, and all its other inputs."""
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
    """Return whether a task made nothing and others can do without it: it failed, or needed one of which the same is true."""
    if not task.fallback or task.state is not TaskState.SKIPPED:
        return bool(task.fallback) and task.state is TaskState.FAILED
    missing = [each for each in map(record.task, producers(task.inputs)) if each.state is not TaskState.SUCCEEDED]
    return all(_is_dispensable(record, each) for each in missing)
