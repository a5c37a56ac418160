"""Pauses between calls that a server may answer later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0


class Backoff:
    """Waits longer before each repeat, for as long as a server is given to recover.

    Args:
        seconds: How long that is, from now on.
        wait: Sleeps for some seconds.
    """

    def __init__(self, seconds: float, wait: Callable[[float], None]) -> None:
        self._seconds, self._wait = seconds, wait
        self.reset()

    def reset(self) -> None:
        """Begin anew: the server did something."""
        self.pause, self._end = _FIRST_PAUSE, time.monotonic() + self._seconds

    def is_over(self) -> bool:
        """Return whether the server has had its time."""
        return time.monotonic() >= self._end

    def wait(self) -> None:
        """Wait before a repeat, at most until the server has had its time; a part of each pause is random, so that clients come apart."""
        left = max(self._end - time.monotonic(), 0.01)
        self._wait(min(self.pause * random.uniform(0.5, 1), left))  # noqa: S311
        self.pause = min(self.pause * 2, _LONGEST_PAUSE)
