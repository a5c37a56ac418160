"""Measure how slow this machine is at the moment: other tests, other programs, a smaller processor."""

from __future__ import annotations

import time

_STEPS = 4_000_000
_IDLE_SECONDS = 0.14  # for these steps
_UNEVEN = 2.0  # a load comes and goes


def unhurried(seconds: float) -> float:
    """Convert a time limit for an idle machine to this machine's present speed; never less.

    The limit is for an undisturbed program. A fixed amount of work measures how slow the machine is now.
    """
    began = time.monotonic()
    sum(step * step for step in range(_STEPS))
    slowness = (time.monotonic() - began) / _IDLE_SECONDS
    return seconds if slowness < _UNEVEN else seconds * slowness * _UNEVEN
