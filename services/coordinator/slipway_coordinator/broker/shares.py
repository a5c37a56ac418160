"""Whose turn it is: projects take turns in proportion to their weights, for each kind of workers apart.

Stride scheduling (Waldspurger and Weihl, 1995): each lease moves a project on by 1/weight, and the project that is furthest behind
goes first. A project that runs as much as its share of the slots already goes after those that do not, or long tasks of one would
come to hold all slots. Nothing is stored: after a restart all begin again side by side, and what runs is known from the leases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop

_MOST_CREDIT = 2.0
"""Turns that a project can be behind: one that could not be served for an hour does not get the next hour for itself."""

Weight = Callable[[str], float]
"""Weight of a project."""


@dataclass
class Shares:
    """Turns of the projects at one kind of workers."""

    _passes: dict[str, float] = field(default_factory=dict)
    _furthest: float = 0.0  # where the project that got the last turn was, at most

    def order(self, waiting: Collection[str], running: Mapping[str, int], weight: Weight) -> Iterator[str]:
        """Yield projects in the order of their turns; the next one is worked out only when it is asked for.

        Args:
            waiting: Projects with offers, in the order in which they began to wait.
            running: Number of attempts that each project runs at these workers.
            weight: Weight of each project, which may have changed since the last turn.
        """
        weights = {project: weight(project) for project in {*waiting, *running}}
        slots, total = sum(running.values()) + 1, sum(weights.values())
        ranks = [
            (
                running.get(project, 0) >= math.ceil(slots * weights[project] / total - 1e-9),
                self._position(project, weights[project]),
                number,
                project,
            )
            for number, project in enumerate(waiting)
        ]
        heapify(ranks)
        while ranks:
            yield heappop(ranks)[-1]

    def charge(self, project: str, weight: float) -> None:
        """Count a lease of a project of this weight."""
        position = self._position(project, weight)
        self._furthest = max(self._furthest, position)
        self._passes[project] = position + 1 / weight

    def forget(self, waiting: Set[str]) -> None:
        """Forget projects without offers that are no further than the others: they begin where these are."""
        for project in [name for name, at in self._passes.items() if name not in waiting and at <= self._furthest]:
            del self._passes[project]

    def _position(self, project: str, weight: float) -> float:
        """Return how far a project is: at least near the others, and beside them at its first turn."""
        return max(self._passes.get(project, self._furthest), self._furthest - _MOST_CREDIT / weight)
