"""Show the parts of divided work as one line, as far as each was done at the first attempt."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from slipway.division import PART, PARTS, split_id
from slipway.results.result import AttemptResult


def fold_parts(attempts: Iterable[AttemptResult]) -> list[AttemptResult]:
    """Return the attempts with one in place of all parts of a task that succeeded at once: their times together, and the memory of
    the one that took most.

    Attempts that failed, and those that followed them, keep their own lines.
    """
    folded: list[AttemptResult] = []
    for name, group in groupby(attempts, key=_divided_task):
        members = list(group)
        plain = [each for each in members if each.outcome == "succeeded" and not each.rule] if name else []
        others = [each for each in members if each not in plain]
        folded += [*([_together(name, plain)] if plain else []), *others]
    return folded


def _divided_task(attempt: AttemptResult) -> str:
    """Return the id of the task that an attempt did a part of; empty for a whole task and for a join."""
    whole, part = split_id(attempt.task, attempt.params)
    return whole if part else ""


def _together(name: str, parts: list[AttemptResult]) -> AttemptResult:
    known = [each.duration_seconds for each in parts if each.duration_seconds is not None]
    first, most = parts[0], max(parts, key=lambda each: each.peak_memory_bytes)
    return first.model_copy(
        update={
            "task": f"{name}: {len(parts)} of {_count(first)} parts",
            "params": {key: value for key, value in first.params.items() if key != PART},
            "reused": all(each.reused for each in parts),
            "duration_seconds": sum(known) if known else None,
            "peak_memory_bytes": most.peak_memory_bytes,
            "memory_sample_seconds": most.memory_sample_seconds,
            "memory_samples_bytes": most.memory_samples_bytes,
        }
    )


def _count(attempt: AttemptResult) -> int:
    return int(attempt.params[PARTS])
