"""How much memory a merge may work in."""

from __future__ import annotations

import psutil


def memory_limit(wanted: int | None, *, allowed: int) -> int:
    """Return bytes to work in: what was asked for, or a quarter of what is free, but not more than the task is allowed."""
    return min(wanted if wanted is not None else psutil.virtual_memory().available // 4, allowed)
