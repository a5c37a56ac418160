"""Measure how far results are from the wanted ones, and limit that by the arithmetic of a type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest share that the arithmetic of a type explains, where both sides compute the same."""


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
    largest = float(np.abs(first - second).max(initial=0.0))
    return Difference(largest, max(1.0, float(np.abs(second).max(initial=0.0))))


def largest(differences: Iterable[Difference]) -> Difference:
    """Return the largest difference, on the largest scale."""
    items = list(differences)
    return Difference(
        max((each.largest for each in items), default=0.0), max((each.scale for each in items), default=1.0)
    )
