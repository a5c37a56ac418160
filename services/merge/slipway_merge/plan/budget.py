"""The working memory of a merge."""

from __future__ import annotations

import psutil


def memory_limit(wanted: int | None, *, allowed: int) -> int:
    """Return the working memory in bytes: the requested amount or a quarter of the free memory, at most the task's limit."""
    return min(wanted if wanted is not None else psutil.virtual_memory().available // 4, allowed)
