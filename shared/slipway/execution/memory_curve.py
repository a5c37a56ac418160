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
    """Collects measurements; joins neighbours whenever there are too many, so that no peak is lost.

    Args:
        seconds: Time that a sample stands for at first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: list[int] = []

    def add(self, memory_bytes: int, at_seconds: float) -> None:
        """Add the measurement of a time since the start; times do not decrease, and need not be evenly spaced."""
        while at_seconds >= self._seconds * MOST_SAMPLES:
            self._samples = [max(self._samples[place : place + 2]) for place in range(0, len(self._samples), 2)]
            self._seconds *= 2
        place = int(at_seconds / self._seconds)
        if place < len(self._samples):
            self._samples[-1] = max(self._samples[-1], memory_bytes)
            return
        # Measurements that came late leave a gap; memory was likely what it was before.
        before = self._samples[-1] if self._samples else memory_bytes
        self._samples += [before] * (place - len(self._samples)) + [memory_bytes]

    def result(self) -> MemoryOverTime:
        """Return the curve so far."""
        return MemoryOverTime(self._seconds, tuple(self._samples))
