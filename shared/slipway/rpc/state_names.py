"""Name the states of exports and tasks as people and JSON see them."""

from typing import Any

from slipway_protos.v1 import export_pb2 as pb

ENDED = frozenset({pb.EXPORT_STATE_SUCCEEDED, pb.EXPORT_STATE_FAILED, pb.EXPORT_STATE_CANCELLED})
"""States in which an export stays until it is retried."""


def export_state(number: int) -> str:
    """Return the name of an export's state, such as ``running``; ``state 9`` for one that only a newer peer knows."""
    return _name(pb.ExportState, "EXPORT_STATE_", number)


def task_state(number: int) -> str:
    """Return the name of a task's state, likewise."""
    return _name(pb.TaskState, "TASK_STATE_", number)


def _name(states: Any, prefix: str, number: int) -> str:
    known = states.DESCRIPTOR.values_by_number.get(number)
    return f"state {number}" if known is None else known.name.removeprefix(prefix).lower()
