"""Record the memory of an attempt over its time in a bounded number of samples."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SAMPLES = 64
"""Enough for a plot, and few enough to keep with every attempt."""


@dataclass(frozen=True, slots=True)
class MemoryOverTime:
    """Resident memory of an attempt's processes.

    Attributes:
        sample_seconds: Time that each sample stands for.
        samples_bytes: Largest memory in each of these times, in order.
    """

    sample_seconds: float = 0.0
    samples_bytes: tuple[int, ...] = ()


class MemoryCurve:
    """Collects measurements taken at equal intervals; joins neighbours whenever there are too many, so that no peak is lost.

    Args:
        seconds: Time between two measurements.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._joined = 1
        self._samples: list[int] = []
        self._last = 0

    def add(self, memory_bytes: int) -> None:
        """Add the next measurement."""
        if self._last:
            self._samples[-1] = max(self._samples[-1], memory_bytes)
        else:
            self._samples.append(memory_bytes)
        self._last = (self._last + 1) % self._joined
        if len(self._samples) == MOST_SAMPLES and not self._last:
            self._samples = [max(self._samples[place : place + 2]) for place in range(0, MOST_SAMPLES, 2)]
            self._joined *= 2

    def result(self) -> MemoryOverTime:
        """Return the curve so far."""
        return MemoryOverTime(self._seconds * self._joined, tuple(self._samples))
