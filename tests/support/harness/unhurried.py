"""How slow this machine is at the moment: other tests, other people, a smaller processor."""

from __future__ import annotations

import time

_STEPS = 4_000_000
_IDLE_SECONDS = 0.14  # for these steps
_UNEVEN = 2.0  # a load comes and goes


def unhurried(seconds: float) -> float:
    """A promise of so many seconds on an idle machine, in seconds of this one as it is now; never less.

    A promise is about what a program does by itself. Work that always takes the same says what the machine makes of it.
    """
    began = time.monotonic()
    sum(step * step for step in range(_STEPS))
    slowness = (time.monotonic() - began) / _IDLE_SECONDS
    return seconds if slowness < _UNEVEN else seconds * slowness * _UNEVEN
