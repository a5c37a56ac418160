"""Choose the measure between two models by their family's comparison: distributions from logits, or other values.

Values that are not logits are embeddings or the score of a regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipway.model.families import Comparison
from slipway.proof.numerics import Floats, LogitComparer, Logits, blocks, finite
from slipway.validation.comparisons import LogitComparison


class VectorComparer:
    """Compares two models' values: :meth:`add` each window, then get the :meth:`result`."""

    def __init__(self) -> None:
        self._width = 0
        self._values = 0
        self._sum_abs = self._max_abs = 0.0
        self._error = self._square = 0.0
        self._distances: list[Floats] = []

    def add(self, other: Logits, own: Logits) -> None:
        """Add one window. other, own: (P, H), the same positions.

        Raises:
            ValueError: The shapes differ.
        """
        if other.shape != own.shape:
            raise ValueError(f"values have shapes {other.shape} and {own.shape}")
        self._width = own.shape[-1]
        self._values += own.size
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            for rows in blocks(*own.shape):
                self._add_block(other[rows].astype(np.float64), own[rows].astype(np.float64))

    def _add_block(self, other: Floats, own: Floats) -> None:
        difference = np.abs(own - other)
        self._sum_abs += float(difference.sum())
        self._max_abs = float(np.maximum(self._max_abs, difference.max()))  # keeps NaN, which max() may lose
        self._error += float(np.square(difference).sum())
        self._square += float(np.square(other).sum())
        lengths = np.linalg.norm(other, axis=-1) * np.linalg.norm(own, axis=-1)
        nothing = np.where((other == own).all(axis=-1), 1.0, 0.0)  # a vector without length has no direction
        cosines = np.where(lengths == 0, nothing, (other * own).sum(axis=-1) / lengths)
        self._distances.append(np.maximum(1.0 - cosines, 0.0))

    def result(self) -> LogitComparison:
        """Return all figures over all added windows; a single value has no direction and therefore no cosine.

        Raises:
            ValueError: Nothing was added.
        """
        if not self._values:
            raise ValueError("no values were compared")
        distances = np.concatenate(self._distances)
        return LogitComparison(
            tokens=len(distances),
            max_abs_diff=finite(self._max_abs),
            mean_abs_diff=finite(self._sum_abs / self._values),
            cosine_distance=finite(distances.mean()) if self._width > 1 else None,
            max_cosine_distance=finite(distances.max()) if self._width > 1 else None,
            relative_error=self._relative_error(),
        )

    def _relative_error(self) -> float | None:
        if self._error == 0:
            return 0.0
        return (
            finite(math.sqrt(self._error / self._square)) if self._square > 0 and math.isfinite(self._error) else None
        )


@dataclass(frozen=True, slots=True)
class Measure:
    """How results are compared.

    Attributes:
        comparer: Computes the figures.
        logits: Whether results are logits: softmax ignores a constant added to all logits of a position.
        many: Whether there are so many results (next tokens) that near ties and noise along the adapter's effect do not matter.
        weak_effect: Distance of base and reference below which the adapter has almost no effect.
    """

    comparer: Callable[[], LogitComparer | VectorComparer]
    logits: bool
    many: bool
    weak_effect: float


def choose_measure(comparison: Comparison, *, width: int) -> Measure:
    """Choose how results of ``width`` values are compared; a single class is a score and not a class."""
    if comparison is Comparison.EMBEDDINGS or (comparison is Comparison.CLASSES and width == 1):
        return Measure(VectorComparer, logits=False, many=False, weak_effect=1e-4)
    many = comparison is Comparison.NEXT_TOKEN
    return Measure(LogitComparer, logits=True, many=many, weak_effect=1e-3)


def distance_of(figures: LogitComparison | None) -> float | None:
    """Return one figure for the distance of two models, which grows with the square of the difference, as KL does; None: unknown."""
    if figures is None:
        return None
    if figures.relative_error is not None:
        return figures.relative_error**2
    return figures.mean_kl
