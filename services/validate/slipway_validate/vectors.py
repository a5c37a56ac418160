"""Measure the distance between two sets of values that are not logits: embeddings, and the score of a regression.

Shapes: P = positions, H = values of one position (1 for a score). Values arrive one window at a time.
"""

from __future__ import annotations

import math

import numpy as np

from slipway.validation.comparisons import LogitComparison
from slipway_validate.numerics import Floats, Logits, blocks, finite


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
        nothing = np.where((other == own).all(axis=-1), 1.0, 0.0)  # what has no length has no direction
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
