"""The record of an export as plain, frozen data, with the states of exports and tasks and the legal moves between them.

A record is stored, published, and sent to clients. Times are seconds since the epoch. Everything is JSON-ready, so the same document
serves as a workflow's step result, a row of the read model and an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from slipway.errors import Failure
from slipway.execution.memory_curve import MemoryOverTime
from slipway.formats.tasks import PlannedTask
from slipway.requirements import Requirements


class ExportState(StrEnum):
    """State of an export."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more happens unless the export is retried."""
        return self in {ExportState.SUCCEEDED, ExportState.FAILED, ExportState.CANCELLED}


class TaskState(StrEnum):
    """State of a task, or of one attempt of it."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"

    @property
    def ended(self) -> bool:
        """Whether this run of the export does nothing more with the task."""
        return self in {TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.SKIPPED}


_E, _T = ExportState, TaskState

EXPORT_MOVES: Mapping[ExportState, frozenset[ExportState]] = {
    _E.QUEUED: frozenset({_E.RUNNING, _E.CANCELLING, _E.FAILED}),
    _E.RUNNING: frozenset({_E.CANCELLING, _E.SUCCEEDED, _E.FAILED}),
    _E.CANCELLING: frozenset({_E.CANCELLED, _E.SUCCEEDED, _E.FAILED}),
    _E.SUCCEEDED: frozenset(),
    _E.FAILED: frozenset({_E.QUEUED}),  # retry
    _E.CANCELLED: frozenset({_E.QUEUED}),  # retry
}

TASK_MOVES: Mapping[TaskState, frozenset[TaskState]] = {
    _T.WAITING: frozenset({_T.QUEUED, _T.CANCELLED, _T.SKIPPED}),
    # Skipped: no task needs it any more. Back to WAITING: the retry of an export that an older version ended on a fault without ending
    # its tasks.
    _T.QUEUED: frozenset({_T.RUNNING, _T.CANCELLED, _T.SKIPPED, _T.SUCCEEDED, _T.FAILED, _T.WAITING}),
    # Back to QUEUED: lease lost, or the next attempt. Back to WAITING: an input has to be made again first.
    _T.RUNNING: frozenset({_T.SUCCEEDED, _T.FAILED, _T.CANCELLED, _T.QUEUED, _T.WAITING}),
    # Its artifact was lost, or one of its inputs changed before a retry.
    _T.SUCCEEDED: frozenset({_T.QUEUED, _T.WAITING}),
    _T.FAILED: frozenset({_T.WAITING}),  # retry
    _T.CANCELLED: frozenset({_T.WAITING}),  # retry
    _T.SKIPPED: frozenset({_T.WAITING}),  # retry
}


def check_export_move(old: ExportState, new: ExportState) -> None:
    """Refuse a move that the table does not allow.

    Raises:
        ValueError: a fault in the coordinator itself.
    """
    if new != old and new not in EXPORT_MOVES[old]:
        raise ValueError(f"an export cannot go from {old} to {new}")


def check_task_move(old: TaskState, new: TaskState) -> None:
    """Refuse a move that the table does not allow.

    Raises:
        ValueError: a fault in the coordinator itself.
    """
    if new != old and new not in TASK_MOVES[old]:
        raise ValueError(f"a task cannot go from {old} to {new}")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    def with_(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced."""
        return self.model_copy(update=changes)


class Resources(_Record):
    """Limits under which an attempt runs.

    Attributes:
        memory_factor: Share of the usual memory limit, above 0.
        threads: Threads for numeric libraries; 0 leaves it to the configuration and the worker.
        timeout_factor: Multiple of the usual time limit.
        exclusive: Nothing else runs on the same worker meanwhile.
    """

    memory_factor: float = 1.0
    threads: int = 0
    timeout_factor: float = 1.0
    exclusive: bool = False


class AttemptRecord(_Record):
    """One try of a task.

    ``rule`` and ``note`` name the recovery rule that led to it and what that changed. ``epoch`` is that of its lease,
    ``lost_epoch`` that of the lease before. ``losses`` counts its workers that fell silent unannounced, ``departures`` those
    that had reported their shutdown before. ``not_before`` and ``avoid`` are as in :class:`~slipway_coordinator.lifecycle.offers.Offer`.
    """

    number: int
    run: int = 1
    state: TaskState
    params: dict[str, Any]
    inputs: dict[str, str] = Field(default_factory=dict)
    resources: Resources = Resources()
    worker: str = ""
    epoch: int = 0
    lost_epoch: int = 0
    losses: int = 0
    departures: int = 0
    failure: Failure | None = None
    rule: str = ""
    note: str = ""
    not_before: float = 0.0
    avoid: tuple[str, ...] = ()
    reused: bool = False
    start_time: float | None = None
    end_time: float | None = None
    peak_memory_bytes: int = 0
    memory: MemoryOverTime = MemoryOverTime()


class TaskRecord(_Record):
    """One planned task, its attempts and, when it succeeded, its result. ``output`` names its only output; empty allows any.

    ``params`` are the planned parameters; a precedent may change those in ``open`` in the first attempt. ``precedent`` is the key under
    which precedents are kept: None until one was looked for, empty if there is no key. ``requested`` is the planned format if another one
    is delivered instead.
    """

    id: str
    stage: str
    params: dict[str, Any]
    inputs: dict[str, str]
    format: str = ""
    partial: bool = False
    requirements: Requirements = Requirements()
    output: str = ""
    open: tuple[str, ...] = ()
    fallback: str = ""
    reserve: dict[str, str] = Field(default_factory=dict)
    precedent: str | None = None
    requested: str = ""
    state: TaskState = TaskState.WAITING
    attempts: tuple[AttemptRecord, ...] = ()
    outputs: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_plan(cls, task: PlannedTask) -> TaskRecord:
        """Return the record of a planned task that has not begun."""
        return cls(**{field.name: getattr(task, field.name) for field in fields(task)})

    @property
    def attempt(self) -> AttemptRecord:
        """The latest attempt; there is one as soon as the task has left WAITING."""
        return self.attempts[-1]

    def move_to(self, state: TaskState, **changes: Any) -> TaskRecord:
        """Return this task in another state."""
        check_task_move(self.state, state)
        return self.with_(state=state, **changes)

    def with_attempt(self, **changes: Any) -> TaskRecord:
        """Return this task with its latest attempt changed."""
        return self.with_(attempts=(*self.attempts[:-1], self.attempt.with_(**changes)))


class ExportRecord(_Record):
    """One export.

    ``revision`` grows with every change; ``run`` counts from 1 and grows with every retry. ``request_id`` is the client's id of
    the request that made it, or empty. Tasks of a higher ``priority`` go first. ``events_read`` is the number of the run's last
    event that this revision includes. ``creator`` is the principal that created it, empty where callers are anonymous. ``needs_gpu``:
    a task of its plan, which may follow only after an import, needs or prefers a worker with a GPU.
    """

    name: str
    configuration: dict[str, Any]
    request_hash: str
    request_id: str = ""
    creator: str = ""
    needs_gpu: bool = False
    priority: int = 0
    sources: dict[str, str]
    labels: dict[str, str] = Field(default_factory=dict)
    tasks: tuple[TaskRecord, ...]
    state: ExportState = ExportState.QUEUED
    failure: Failure | None = None
    warnings: tuple[str, ...] = ()
    recovery_profile: str = ""
    traceparent: str = ""
    revision: int = 1
    run: int = 1
    events_read: int = 0
    create_time: float
    begin_time: float | None = None
    end_time: float | None = None

    @property
    def project(self) -> str:
        """Project it belongs to."""
        return self.name.split("/")[1]

    @property
    def etag(self) -> str:
        """Tag that differs after every change of the export."""
        return f"{self.run}-{self.revision}"

    def task(self, task_id: str) -> TaskRecord:
        """Return the task with this id."""
        return next(task for task in self.tasks if task.id == task_id)

    def with_task(self, task: TaskRecord) -> ExportRecord:
        """Return this export with one task replaced."""
        return self.with_(tasks=tuple(task if old.id == task.id else old for old in self.tasks))

    def move_to(self, state: ExportState, **changes: Any) -> ExportRecord:
        """Return this export in another state."""
        check_export_move(self.state, state)
        return self.with_(state=state, **changes)

    @property
    def workflow_id(self) -> str:
        """Id of the durable workflow of this run."""
        return f"{self.name}#{self.run}"

    @property
    def outputs(self) -> dict[str, str]:
        """Delivered artifacts by format, in plan order."""
        return {
            task.format: next(iter(task.outputs.values()))
            for task in self.tasks
            if task.format and task.state is TaskState.SUCCEEDED and task.outputs
        }

    @property
    def results(self) -> set[str]:
        """Digests of all artifacts its tasks made, delivered or not."""
        return {digest for task in self.tasks for digest in task.outputs.values()}

    def to_json(self) -> dict[str, Any]:
        """Return this record as JSON-ready data."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Any) -> ExportRecord:
        """Return the record that :meth:`to_json` wrote."""
        return cls.model_validate(data)
