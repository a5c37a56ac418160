"""Compare a graph with PyTorch: the calls at which they are compared, and how far their results differ.

The calls have other shapes than the traced sample, so that a lost branch shows. The arithmetic of a type limits the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BEYOND = 5
"""Tokens behind a threshold."""

Array = npt.NDArray[Any]

DIFFERENCE_LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest share that the arithmetic of a type explains, where both sides compute the same."""


@dataclass(frozen=True, slots=True)
class Case:
    """The shape of one call.

    Attributes:
        name: For messages.
        batch: Rows.
        sequence: Tokens of the call.
        past: Tokens before it, in the cache.
        padding: Padded places of the first rows.
    """

    name: str
    batch: int
    sequence: int
    past: int = 0
    padding: tuple[int, ...] = ()


_DECODER = (
    Case("one token, nothing before", 1, 1),
    Case("a text, nothing before", 1, 9),
    Case("padded texts, nothing before", 3, 7, 0, (3, 0, 1)),
    Case("one token after one", 1, 1, 1),
    Case("one token after padded texts", 2, 1, 6, (2, 0)),
    Case("several tokens after padded texts", 2, 5, 4, (1, 0)),
)
_TEXT = (
    Case("one token", 1, 1),
    Case("a text", 1, 9),
    Case("padded texts", 3, 7, 0, (3, 0, 1)),
    Case("a long text", 1, 40),
)


def sample_case(*, cached: bool, one_row: bool) -> Case:
    """Return the call that is traced: sizes are different and above 1, so that a tracer neither confuses nor fixes axes."""
    batch = 1 if one_row else 2
    return Case("the sample", batch, 3, 5, (2,)) if cached else Case("the sample", batch, 6, 0, (0, 2)[:batch])


def cases(*, cached: bool, one_row: bool, positions: int, thresholds: tuple[int, ...], longest: int) -> Iterator[Case]:
    """Yield the calls that a model of these sizes can take."""
    limit = min(positions, longest)
    beyond = [each + BEYOND for each in thresholds]
    candidates = [
        *(_DECODER if cached else _TEXT),
        *(Case(f"a text beyond {size - BEYOND} tokens", 1, size) for size in beyond),
        *(Case(f"one token beyond {size - BEYOND} tokens", 1, 1, size - 1) for size in beyond if cached),
    ]
    for case in candidates:
        if case.past + case.sequence <= limit and (case.batch == 1 or not one_row):
            yield case


def first_unproven_length(*, positions: int, thresholds: tuple[int, ...], longest: int) -> int:
    """Return the first number of tokens beyond which the model computes otherwise and no call is compared; 0 if there is none."""
    beyond = [each for each in thresholds if each < positions and each + BEYOND > min(positions, longest)]
    return beyond[0] if beyond else 0


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of results.

    Attributes:
        largest: Largest absolute difference; infinite if the shapes differ, or if a result is not a number.
        scale: Size of the largest wanted result, and at least 1.
    """

    largest: float
    scale: float

    @property
    def share(self) -> float:
        """Return the difference as a share of the scale."""
        return float(np.float32(self.largest) / np.float32(self.scale))


def difference(found: Array, wanted: Array, *, overflow: bool = False) -> Difference:
    """Return how far results are from the wanted ones, of any shape.

    Args:
        found: The results.
        wanted: The wanted results.
        overflow: Whether values that are no numbers are equal where both sides have the same, as where both overflow.
    """
    if found.shape != wanted.shape:
        return Difference(float("inf"), 1.0)
    kind = np.result_type(found, wanted, np.float32)
    first, second = found.astype(kind, copy=False), wanted.astype(kind, copy=False)
    numbers = np.isfinite(first) & np.isfinite(second)
    if not numbers.all():
        if not overflow or not np.array_equal(first[~numbers], second[~numbers], equal_nan=True):
            return Difference(float("inf"), 1.0)
        first, second = first[numbers], second[numbers]
    most = float(np.abs(first - second).max(initial=0.0))
    return Difference(most, max(1.0, float(np.abs(second).max(initial=0.0))))


def largest_difference(differences: Iterable[Difference]) -> Difference:
    """Return the largest difference, on the largest scale."""
    items = list(differences)
    return Difference(
        max((each.largest for each in items), default=0.0), max((each.scale for each in items), default=1.0)
    )
