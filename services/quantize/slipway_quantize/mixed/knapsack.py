"""Choose one option for each item so that the sum of errors is small within a size: the multiple-choice knapsack. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store an item.

    Attributes:
        size: Its size in bytes.
        error: What it costs.
    """

    size: int
    error: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen options.

    Attributes:
        chosen: Index of the option of each item.
        size: Sum of their sizes.
        error: Sum of their errors.
        bound: Lower bound of the sum of errors that any choice within the size has.
    """

    chosen: tuple[int, ...]
    size: int
    error: float
    bound: float


def smallest(items: Sequence[Sequence[Option]]) -> int:
    """Return the smallest size that any choice has."""
    return sum(min(option.size for option in options) for options in items)


def choose(items: Sequence[Sequence[Option]], *, room: int) -> Solution | None:
    """Choose one option for each item; return None if even the smallest ones do not fit.

    Each item starts with its smallest option. Steps to larger options on the lower convex hull of (size, error) are taken in the order of
    the error that they save per byte, those that still fit. The first step that does not fit gives the bound: a part of it would
    be the best choice if options could be divided, so this choice is worse than the best by less than that one step saves.

    Args:
        items: The options of each item, at least one.
        room: Largest sum of sizes.
    """
    hulls = [_hull(options) for options in items]
    chosen = [hull[0] for hull in hulls]
    size = sum(items[item][first].size for item, first in enumerate(chosen))
    if size > room:
        return None
    steps = [
        (-_saved_error(items[item], step) / _added_bytes(items[item], step), item, step)
        for item, hull in enumerate(hulls)
        for step in pairwise(hull)
    ]
    error = sum(items[item][first].error for item, first in enumerate(chosen))
    bound, divided, blocked = error, False, set[int]()
    for rate, item, step in sorted(steps):
        more = _added_bytes(items[item], step)
        if not divided:
            share = min(1.0, (room - size) / more)
            bound += rate * more * share
            divided = share < 1
        if item in blocked or size + more > room:
            blocked.add(item)  # later steps of the item start from this one
            continue
        chosen[item], size = step[1], size + more
        error -= _saved_error(items[item], step)
    return Solution(tuple(chosen), size, max(error, 0.0), max(min(bound, error), 0.0))


def _hull(options: Sequence[Option]) -> list[int]:
    """Return the options on the lower convex hull, by size: each saves less per byte than the one before."""
    hull: list[int] = []
    for index in sorted(range(len(options)), key=lambda each: (options[each].size, options[each].error, each)):
        if hull and options[index].error >= options[hull[-1]].error:
            continue
        while len(hull) > 1 and _rate(options, (hull[-1], index)) >= _rate(options, (hull[-2], hull[-1])):
            hull.pop()
        hull.append(index)
    return hull


def _saved_error(options: Sequence[Option], step: tuple[int, int]) -> float:
    return options[step[0]].error - options[step[1]].error


def _added_bytes(options: Sequence[Option], step: tuple[int, int]) -> int:
    return options[step[1]].size - options[step[0]].size


def _rate(options: Sequence[Option], step: tuple[int, int]) -> float:
    return _saved_error(options, step) / _added_bytes(options, step)
