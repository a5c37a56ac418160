"""Convert records to the messages that clients and workers receive."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from slipway.configuration import ExportConfiguration
from slipway.rpc.messages import configuration_message, put_call, recorded_configuration_message
from slipway.rpc.values import status_of, struct_of, timestamp
from slipway.security.access.projects import ProjectLimits
from slipway_coordinator.lifecycle.changes import IN_MEMORY, IN_MEMORY_SIZE, ChangeKind, ExportChange
from slipway_coordinator.lifecycle.offers import Granted
from slipway_coordinator.lifecycle.quotas import ProjectUsage
from slipway_coordinator.lifecycle.records import AttemptRecord, ExportRecord, ExportState, TaskRecord, TaskState
from slipway_coordinator.lifecycle.summaries import ExportSummary
from slipway_coordinator.workflow.observation import attempt_span
from slipway_protos.v1 import configuration_pb2, coordinator_pb2, export_pb2, worker_pb2

if TYPE_CHECKING:  # they import SQLAlchemy, a quarter of the time of a finished export's next delivery
    from slipway_coordinator.storage.changes import NumberedChange, Position
    from slipway_coordinator.storage.events import WatchEvent
    from slipway_coordinator.workflow.feed import FeedEvent


_LONGEST_KEPT = 16 << 10
"""Characters of a configuration whose message is kept."""


def export_message(record: ExportRecord) -> export_pb2.Export:
    """Return an export as clients see it."""
    message = export_summary(record)
    message.configuration.CopyFrom(_configuration_message(record.configuration))
    message.sources.update(record.sources)
    message.tasks.extend(_task_message(task) for task in record.tasks)
    return message


def _configuration_message(recorded: dict[str, Any]) -> configuration_pb2.ExportConfiguration:
    """Return the configuration with today's defaults, or as recorded if one of its formats is no longer installed.

    The caller only copies it: the message of one export is asked for again and again, and exports of a batch have the same
    configuration, so it is kept.
    """
    text = json.dumps(recorded)
    return _kept_message(text) if len(text) <= _LONGEST_KEPT else _convert(recorded)


@functools.lru_cache(maxsize=128)
def _kept_message(text: str) -> configuration_pb2.ExportConfiguration:
    return _convert(json.loads(text))


def _convert(recorded: dict[str, Any]) -> configuration_pb2.ExportConfiguration:
    try:
        return configuration_message(ExportConfiguration.model_validate(recorded))
    except ValidationError:
        return recorded_configuration_message(recorded)


def export_summary(record: ExportRecord | ExportSummary) -> export_pb2.Export:
    """Return an export without configuration, sources and tasks."""
    message = export_pb2.Export(
        name=record.name,
        state=export_state(record.state),
        outputs=record.outputs,
        warnings=record.warnings,
        recovery_profile=record.recovery_profile,
        trace_id=record.traceparent.split("-")[1] if record.traceparent.count("-") == 3 else "",
        etag=record.etag,
        create_time=timestamp(record.create_time),
        end_time=timestamp(record.end_time),
        labels=record.labels,
        priority=record.priority,
        creator=record.creator,
    )
    if record.failure is not None:
        message.error.CopyFrom(status_of(record.failure))
    return message


def _task_message(task: TaskRecord) -> export_pb2.Task:
    return export_pb2.Task(
        id=task.id,
        stage=task.stage,
        params=struct_of(task.params),
        inputs=task.inputs,
        format=task.format,
        requested_format=task.requested,
        state=task_state(task.state),
        attempts=[_attempt_message(attempt) for attempt in task.attempts],
        outputs=task.outputs,
        facts=struct_of(task.facts),
    )


def _attempt_message(attempt: AttemptRecord) -> export_pb2.Attempt:
    message = export_pb2.Attempt(
        number=attempt.number,
        state=task_state(attempt.state),
        params=struct_of(attempt.params),
        worker=attempt.worker,
        rule=attempt.rule,
        note=attempt.note,
        reused=attempt.reused,
        start_time=timestamp(attempt.start_time),
        end_time=timestamp(attempt.end_time),
        peak_memory_bytes=attempt.peak_memory_bytes,
        memory=export_pb2.MemoryOverTime(
            sample_seconds=attempt.memory.sample_seconds, samples_bytes=attempt.memory.samples_bytes
        ),
    )
    if attempt.failure is not None:
        message.error.CopyFrom(status_of(attempt.failure))
    return message


def export_state(state: ExportState) -> export_pb2.ExportState:
    """Return the state's number on the wire."""
    return cast("export_pb2.ExportState", export_pb2.ExportState.Value(f"EXPORT_STATE_{state.name}"))


def task_state(state: TaskState) -> export_pb2.TaskState:
    """Return the state's number on the wire."""
    return cast("export_pb2.TaskState", export_pb2.TaskState.Value(f"TASK_STATE_{state.name}"))


def event_message(event: WatchEvent) -> export_pb2.ExportEvent:
    """Return an event as watchers receive it."""
    message = export_pb2.ExportEvent(sequence=event.sequence, time=timestamp(event.time))
    match event.payload:
        case ExportRecord() as record:
            message.export.CopyFrom(export_message(record))
        case export_pb2.TaskProgress() as progress:
            message.progress.CopyFrom(progress)
        case line:
            message.log.CopyFrom(line)
    return message


class ExportsEvents:
    """The messages that watchers of projects receive. A change is made a message once for all of them, which none of them changes."""

    def __init__(self) -> None:
        self._made: dict[
            Position, tuple[export_pb2.ExportsEvent, int]
        ] = {}  # with the size of the row, the oldest first
        self._size = 0

    def of(self, event: FeedEvent) -> export_pb2.ExportsEvent:
        """Return the message of an event."""
        if event.change is None:
            return _event_without_change(event)
        made = self._made.get(event.position)
        if made is None:
            made = _change_event(event.change), event.change.size
            self._keep(event.position, made)
        return made[0]

    def _keep(self, position: Position, made: tuple[export_pb2.ExportsEvent, int]) -> None:
        self._made[position] = made
        self._size += made[1]
        while len(self._made) > IN_MEMORY or self._size > IN_MEMORY_SIZE:
            self._size -= self._made.pop(next(iter(self._made)))[1]


def _change_event(stored: NumberedChange) -> export_pb2.ExportsEvent:
    change = _change_message(stored.change)
    return export_pb2.ExportsEvent(cursor=stored.position.cursor, time=timestamp(stored.time), change=change)


def _event_without_change(event: FeedEvent) -> export_pb2.ExportsEvent:
    cursor = event.position.cursor
    if event.advance is not None:
        progress = export_pb2.ExportProgress(export=event.advance.record.name, progress=event.advance.progress)
        return export_pb2.ExportsEvent(cursor=cursor, time=timestamp(event.advance.time), progress=progress)
    now, bookmark = timestamp(time.time()), export_pb2.ExportsBookmark()
    return export_pb2.ExportsEvent(cursor=cursor, time=now, bookmark=bookmark)


def _change_message(change: ExportChange) -> export_pb2.ExportChange:
    export = export_summary(change.export)
    export.outputs.update(change.outputs)
    message = export_pb2.ExportChange(kind=_change_kind(change.kind), export=export)
    if change.previous is not None:
        message.previous_state = export_state(change.previous)
    return message


def _change_kind(kind: ChangeKind) -> export_pb2.ExportChangeKind:
    return cast("export_pb2.ExportChangeKind", export_pb2.ExportChangeKind.Value(f"EXPORT_CHANGE_KIND_{kind.name}"))


def project_message(name: str, limits: ProjectLimits, usage: ProjectUsage, *, unended: int) -> coordinator_pb2.Project:
    """Return a project as clients see it; ``unended`` counts its exports that wait or run."""
    return coordinator_pb2.Project(
        name=f"projects/{name}",
        limits=coordinator_pb2.ProjectLimits(
            weight=limits.weight,
            highest_priority=limits.highest_priority,
            unended_exports=limits.unended_exports,
            stored_bytes=limits.stored_bytes,
            gpu_seconds=limits.gpu_seconds,
        ),
        usage=coordinator_pb2.ProjectUsage(
            unended_exports=unended,
            stored_bytes=usage.stored_bytes,
            unmeasured_artifacts=usage.unmeasured_artifacts,
            gpu_seconds=round(usage.gpu_seconds, 3),
        ),
    )


def lease_message(granted: Granted) -> worker_pb2.TaskLease:
    """Return a lease as its worker receives it."""
    offer = granted.offer
    lease = worker_pb2.TaskLease(
        task=offer.key,
        lease_epoch=granted.epoch,
        traceparent=attempt_span(offer.traceparent, offer.key, granted.epoch),
    )
    put_call(lease, replace(offer.call, limits=replace(offer.call.limits, max_memory_bytes=granted.max_memory_bytes)))
    return lease
