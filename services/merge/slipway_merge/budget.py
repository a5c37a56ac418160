"""Memory that threads share: each waits until what it is about to need is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


class MemoryBudget:
    """A number of bytes to work in.

    Args:
        limit: Bytes in use at most; what needs more than that alone runs alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._freed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Hold some bytes; waits for others to give theirs back while there are too few."""
        with self._freed:
            self._freed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self.limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._freed:
                self._used -= nbytes
                self._freed.notify_all()


def memory_limit(wanted: int | None, *, allowed: int) -> int:
    """Bytes to work in: what was asked for, or a quarter of what is free, but not more than the task is allowed."""
    return min(wanted if wanted is not None else psutil.virtual_memory().available // 4, allowed)
