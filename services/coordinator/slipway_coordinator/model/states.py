"""States of exports and tasks, and the legal moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


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
