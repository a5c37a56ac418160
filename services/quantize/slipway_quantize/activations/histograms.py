"""Count the magnitudes of a value in bins, and choose its range: the largest, a percentile, or the least loss of information.

The number of bins stays the same: if a larger magnitude comes, neighbouring bins are joined until it fits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
METHODS = ("minmax", "entropy", "percentile")
BINS = 2048
_PERCENTILE = 0.99999
"""Share of the values inside the range: with much less, the few large features of language models are cut off."""
_LEVELS = 128
"""Magnitudes that an integer of eight bits with a sign has."""
_FLOOR = 1e-9
_LEAST_END = 2.0**-60


class Histogram:
    """Magnitudes of one value.

    Attributes:
        largest: The largest.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._end = 0.0
        self._counts = np.zeros(BINS, np.int64)

    def add(self, values: Array) -> None:
        """Count values of any shape; all are finite."""
        magnitudes = np.abs(values.ravel())
        top = float(magnitudes.max(initial=0.0))
        self.largest = max(self.largest, top)
        if top == 0.0 and self._end == 0.0:
            self._counts[0] += magnitudes.size
            return
        if self._end == 0.0:
            self._end = max(_LEAST_END, 2.0 ** math.ceil(math.log2(top)))
        while top > self._end:
            joined = self._counts.reshape(-1, 2).sum(axis=1)
            self._counts = np.concatenate([joined, np.zeros(BINS // 2, np.int64)])
            self._end *= 2
        index = np.minimum((magnitudes * np.float32(BINS / self._end)).astype(np.int32), BINS - 1)
        self._counts += np.bincount(index, minlength=BINS)

    def range(self, method: str) -> float:
        """Return the magnitude that the largest integer should stand for."""
        match method:
            case "percentile":
                magnitude = self._percentile()
            case "entropy":
                magnitude = self._entropy()
            case _:
                magnitude = self.largest
        return min(magnitude, self.largest)

    def _percentile(self) -> float:
        inside = np.searchsorted(self._counts.cumsum(), _PERCENTILE * self._counts.sum())
        return (int(inside) + 1) * self._end / BINS

    def _entropy(self) -> float:
        """Return the range whose quantized distribution diverges least from the counted one (TensorRT's calibration)."""
        used = int(np.flatnonzero(self._counts)[-1]) + 1 if self._counts.any() else 1
        counts = self._counts.astype(np.float64)
        counts[0] = min(counts[0], counts[1])  # every range holds all zeros
        best, chosen = math.inf, used
        for width in range(min(_LEVELS, used), used + 1, 8):
            divergence = _information_loss(counts[:used], width)
            if divergence < best:
                best, chosen = divergence, width
        return chosen * self._end / BINS


def _information_loss(counts: Array, width: int) -> float:
    """Return the divergence of the clipped and quantized counts from the clipped ones."""
    clipped = counts[:width].copy()
    clipped[-1] += counts[width:].sum()
    level = np.minimum(np.arange(width) * _LEVELS // width, _LEVELS - 1)
    filled = counts[:width] > 0
    inside = np.bincount(level, weights=counts[:width], minlength=_LEVELS)
    sizes = np.bincount(level, weights=filled, minlength=_LEVELS)
    spread = np.where(filled, (inside / np.maximum(sizes, 1))[level], 0.0)
    if not clipped.sum() or not spread.sum():
        return math.inf
    p, q = clipped / clipped.sum(), spread / spread.sum()
    return float(np.sum(np.where(p > 0, p * np.log(np.maximum(p, _FLOOR) / np.maximum(q, _FLOOR)), 0.0)))
