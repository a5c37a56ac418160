"""The table of GPU seconds: how long workers with GPUs were leased to the tasks of each project, times their GPUs, by day (UTC).

A lease says since when its time is not in the table, and of how many GPUs. The transaction that ends it adds that time, so it counts
once, whatever ends in between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import sqlalchemy as sa

from slipway.security.access.projects import WINDOW_DAYS
from slipway_coordinator.model.quotas import project_of_export
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.schema import gpu_seconds as _gpu_seconds

DAY_SECONDS = 86_400
_KEPT_DAYS = 400
"""Days that are kept, for operators who look back."""
_LONGEST_SECONDS = _KEPT_DAYS * DAY_SECONDS

_ADD = sa.text("""
    INSERT INTO slipway_gpu_seconds (project, day, seconds) VALUES (:project, :day, :seconds)
    ON CONFLICT (project, day) DO UPDATE SET seconds = slipway_gpu_seconds.seconds + excluded.seconds
""")
# One statement, because a task that ends between two of them would count twice, or not at all.
_WINDOW = """
    SELECT project AS name, day AS number, seconds AS amount, 0 AS running FROM slipway_gpu_seconds WHERE day >= :first{more}
    UNION ALL
    SELECT export, gpus, since, 1 FROM slipway_leases WHERE gpus > 0 AND state = 'held'
"""
_OF_ALL, _OF_ONE = sa.text(_WINDOW.format(more="")), sa.text(_WINDOW.format(more=" AND project = :project"))


class Run(NamedTuple):
    """Time of a lease that is not in the table: of an export, on so many GPUs, since a time in seconds since the epoch."""

    export: str
    gpus: int
    since: float

    @property
    def project(self) -> str:
        """Project of the export."""
        return project_of_export(self.export)


class GpuSeconds:
    """The table. All calls block for some milliseconds, and join an open transaction.

    Args:
        transactions: The transactions of the coordinator.
        clock: Returns seconds since the epoch.
    """

    def __init__(self, transactions: Transactions, *, clock: Callable[[], float] = time.time) -> None:
        self._transactions = transactions
        self.clock = clock

    def add(self, run: Run, *, until: float) -> None:
        """Add the time of a lease. The caller notes in the lease, in the same transaction, that it is added."""
        with self._transactions.begin() as connection:
            for day, seconds in _split(run, until=until):
                connection.execute(_ADD, {"project": run.project, "day": day, "seconds": seconds})

    def forget_old(self) -> None:
        """Forget the days that nobody looks back to."""
        oldest = _day(self.clock()) - _KEPT_DAYS
        with self._transactions.begin() as connection:
            connection.execute(sa.delete(_gpu_seconds).where(_gpu_seconds.c.day < oldest))

    def by_day(self, project: str) -> dict[int, float]:
        """Return a project's seconds on each day of the window, with those of running tasks."""
        return self._sums(project).get(project, {})

    def by_project(self) -> dict[str, float]:
        """Return the seconds of each project in the window, with those of running tasks."""
        return {project: sum(days.values()) for project, days in self._sums(None).items()}

    def _sums(self, project: str | None) -> dict[str, dict[int, float]]:
        now = self.clock()
        first = _day(now) - WINDOW_DAYS + 1
        query, values = (_OF_ALL, {}) if project is None else (_OF_ONE, {"project": project})
        with self._transactions.begin() as connection:
            rows = connection.execute(query, {"first": first, **values}).all()
        sums: dict[str, defaultdict[int, float]] = {}
        for row in rows:
            run = Run(row.name, row.number, row.amount) if row.running else None
            owner = row.name if run is None else run.project
            if project not in {None, owner}:
                continue
            days = [(row.number, row.amount)] if run is None else _split(run, until=now)
            for day, seconds in days:
                if day >= first:
                    sums.setdefault(owner, defaultdict(float))[day] += seconds
        return {name: dict(days) for name, days in sums.items()}


def _day(at: float) -> int:
    return int(at // DAY_SECONDS)


def _split(run: Run, *, until: float) -> Iterator[tuple[int, float]]:
    """Yield the GPU seconds of a lease on each of its days; none if the clock was set back."""
    at = max(run.since, until - _LONGEST_SECONDS)
    while at < until:
        end = min(until, (_day(at) + 1) * float(DAY_SECONDS))
        yield _day(at), (end - at) * run.gpus
        at = end
