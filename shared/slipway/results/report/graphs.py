"""What graphs consisted of before and after their optimization, as the tasks that made them recorded it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, ValidationError


class Nodes(BaseModel):
    """A task's graphs: the number of nodes, their size without weights, how often each operator occurs, and how fast they are if measured."""

    nodes: NonNegativeInt
    size_bytes: NonNegativeInt
    operators: dict[str, NonNegativeInt]
    prefill_ms: NonNegativeFloat | None = None
    decode_ms: NonNegativeFloat | None = None


class Optimization(BaseModel):
    """The nodes before and after."""

    before: Nodes
    after: Nodes

    @property
    def times(self) -> dict[str, str]:
        """Return what was measured before and after, in milliseconds, by its name for people."""
        found = {}
        for title, name in (("Prompt", "prefill_ms"), ("Token", "decode_ms")):
            before, after = getattr(self.before, name), getattr(self.after, name)
            if before is not None and after is not None:
                found[title] = f"{before:.4g} → {after:.4g} ms"
        return found


def optimizations(lineage: Mapping[str, Any]) -> Iterator[tuple[str, Optimization]]:
    """Yield task and nodes of each task that recorded them in a form that is known here."""
    for task in lineage.get("tasks", ()):
        try:
            yield str(task["id"]), Optimization.model_validate(task["statistics"])
        except (KeyError, TypeError, ValidationError):
            continue
