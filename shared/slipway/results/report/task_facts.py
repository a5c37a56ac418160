"""Read what tasks reported: the text of a calibration, and graphs before and after their optimization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, ValidationError

from slipway.texts import printable

_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Vocabulary(BaseModel):
    coverage: _Share


class _Overlap(BaseModel):
    overlap: _Share
    passages_left_out: NonNegativeInt


class _Lengths(BaseModel):
    shortest: NonNegativeInt
    median: NonNegativeInt | float
    longest: NonNegativeInt


class Profile(BaseModel):
    """The text of a calibration: its origin, amount, languages, and what it has in common with the held-out text (None: not compared)."""

    source: Annotated[str, Field(max_length=500)]
    passages: NonNegativeInt
    tokens: NonNegativeInt
    passage_tokens: _Lengths
    scripts: dict[str, _Share]
    vocabulary: _Vocabulary
    heldout: _Overlap | None = None

    @property
    def languages(self) -> str:
        """Return the scripts with their shares of the letters, for people."""
        return ", ".join(f"{printable(name).capitalize()} {share:.0%}" for name, share in self.scripts.items())


def calibration_profile(lineage: Mapping[str, Any]) -> Profile | None:
    """Return the profile that a task recorded in a form that is known here; None if there is none."""
    for task in lineage.get("tasks", ()):
        try:
            return Profile.model_validate(task["profile"])
        except (KeyError, TypeError, ValidationError):
            continue
    return None


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
        texts = {}
        for title, name in (("Prompt", "prefill_ms"), ("Token", "decode_ms")):
            before, after = getattr(self.before, name), getattr(self.after, name)
            if before is not None and after is not None:
                texts[title] = f"{before:.4g} → {after:.4g} ms"
        return texts


def optimizations(lineage: Mapping[str, Any]) -> Iterator[tuple[str, Optimization]]:
    """Yield task and nodes of each task that recorded them in a form that is known here."""
    for task in lineage.get("tasks", ()):
        try:
            yield str(task["id"]), Optimization.model_validate(task["statistics"])
        except (KeyError, TypeError, ValidationError):
            continue
