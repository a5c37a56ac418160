"""What graphs consisted of before and after their optimization, as the tasks that made them recorded it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, NonNegativeInt, ValidationError


class Nodes(BaseModel):
    """The nodes of a task's graphs: their number, their size without weights, and how often each operator occurs."""

    nodes: NonNegativeInt
    size_bytes: NonNegativeInt
    operators: dict[str, NonNegativeInt]


class Optimization(BaseModel):
    """The nodes before and after."""

    before: Nodes
    after: Nodes


def optimizations(lineage: Mapping[str, Any]) -> Iterator[tuple[str, Optimization]]:
    """Yield task and nodes of each task that recorded them in a form that is known here."""
    for task in lineage.get("tasks", ()):
        try:
            yield str(task["id"]), Optimization.model_validate(task["statistics"])
        except (KeyError, TypeError, ValidationError):
            continue
