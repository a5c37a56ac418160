"""What all comparisons share: conversations, sessions, and rows of tokens with padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Session(Protocol):
    """A graph that runs on arrays."""

    def run(self, feed: dict[str, Array]) -> dict[str, Array]:
        """Run the graph; inputs that it does not have are left out."""
        ...

    def empty_past(self, *, batch: int) -> dict[str, Array]:
        """Return an empty cache by input name. Each tensor: (batch, heads, 0, head size)."""
        ...


class BufferedSession(Session, Protocol):
    """A graph whose past and present may share a buffer."""

    def sharing(self, *, tokens: int) -> Session:
        """Return a session whose past and present are one buffer with room for so many tokens."""
        ...


class Conversation(Protocol):
    """One or several calls that are compared; both sides give one array per call, without padding."""

    @property
    def name(self) -> str:
        """Return its name in messages."""
        ...

    @property
    def calls(self) -> int:
        """Return the number of calls."""
        ...

    def prepare(self, model: Any) -> None:
        """Ask transformers' model for what :meth:`reference` needs, before calls of the model are recorded."""
        ...

    def reference(self, model: Any) -> Iterator[Array]:
        """Run transformers' model."""
        ...

    def exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        """Run the graphs, by their names."""
        ...


def largest_difference(found: Array, reference: Array) -> float:
    """Return the largest difference of two arrays; infinite for other shapes and for NaN, so that nothing smaller replaces it."""
    if found.shape != reference.shape:
        return float("inf")
    diff = float(np.abs(found - reference).max(initial=0.0))
    return diff if diff == diff else float("inf")  # noqa: PLR0124 - NaN is not equal to itself


def random_rows(
    random: np.random.Generator, *, vocabulary: int, pads: tuple[int, ...], length: int, side: str, padding: int | None
) -> tuple[Array, Array]:
    """Make rows of random tokens with padding on a side: ids and mask, both (len(pads), length).

    Padding has the model's padding token, and no other place has it: some models find padding by its token.
    """
    ids = random.integers(0, vocabulary, size=(len(pads), length), dtype=np.int64)
    columns = np.arange(length)[None, :]
    counts = np.array(pads)[:, None]
    mask = (columns >= counts if side == "left" else columns < length - counts).astype(np.int64)
    if padding is not None:
        ids = np.where(ids == padding, (ids + 1) % vocabulary, ids)
        ids = np.where(mask == 0, padding, ids)
    return ids, mask
