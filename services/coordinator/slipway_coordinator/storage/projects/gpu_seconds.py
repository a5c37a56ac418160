"""The table of GPU seconds: how long tasks that need or prefer a GPU had one, by project and day (UTC).

A task on a worker with several GPUs has all of them, and a part of them where the worker has several slots.

A lease says since when its time is not in the table, and of how many GPUs. The transaction that ends it adds that time, so it counts
once, whatever ends in between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import sqlalchemy as sa

from slipway.security.access.projects import WINDOW_DAYS
from slipway_coordinator.lifecycle.quotas import project_of_export
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
_ALIVE = sa.text("""
    UPDATE slipway_epochs SET alive_time = :now WHERE EXISTS (SELECT 1 FROM slipway_leases WHERE gpus > 0 AND state = 'held')
""")
# One statement, because a task that ends between two of them would count twice, or not at all.
_WINDOW = """
    SELECT project AS name, day AS number, seconds AS amount, 0 AS running FROM slipway_gpu_seconds
    WHERE day BETWEEN :first AND :last{more}
    UNION ALL
    SELECT export, gpus, since, 1 FROM slipway_leases WHERE gpus > 0 AND state = 'held'
"""
_OF_ALL = sa.text(_WINDOW.format(more=""))
_OF_SOME = sa.text(_WINDOW.format(more=" AND project IN :projects")).bindparams(
    sa.bindparam("projects", expanding=True)
)


class LeaseTime(NamedTuple):
    """Time of a lease that is not in the table: of an export, on so many GPUs, since a time in seconds since the epoch."""

    export: str
    gpus: float
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

    def add(self, lease: LeaseTime, *, until: float) -> None:
        """Add the time of a lease. The caller notes in the lease, in the same transaction, that it is added."""
        with self._transactions.begin() as connection:
            for day, seconds in _split(lease, until=until):
                connection.execute(_ADD, {"project": lease.project, "day": day, "seconds": seconds})

    def note_alive(self) -> None:
        """Store that a coordinator runs now, if there are leases on GPUs."""
        with self._transactions.begin() as connection:
            connection.execute(_ALIVE, {"now": self.clock()})

    def read_alive_time(self) -> float:
        """Return when a coordinator was last known to run, in seconds since the epoch."""
        with self._transactions.begin() as connection:
            return connection.execute(sa.text("SELECT alive_time FROM slipway_epochs")).scalar() or 0.0

    def forget_old(self) -> None:
        """Forget the days that nobody looks back to."""
        oldest = _day(self.clock()) - _KEPT_DAYS
        with self._transactions.begin() as connection:
            connection.execute(sa.delete(_gpu_seconds).where(_gpu_seconds.c.day < oldest))

    def first_day(self) -> int:
        """Return the first day of the window, in days since the epoch."""
        return _day(self.clock()) - WINDOW_DAYS + 1

    def by_day(self, project: str) -> dict[int, float]:
        """Return a project's seconds on each day of the window, with those of running tasks."""
        return self._sums([project]).get(project, {})

    def by_project(self) -> dict[str, float]:
        """Return the seconds of each project in the window, with those of running tasks."""
        return {project: sum(days.values()) for project, days in self._sums(None).items()}

    def of_each(self, projects: Collection[str]) -> dict[str, float]:
        """Return the seconds in the window of those of these projects that have any, with those of running tasks."""
        return {project: sum(days.values()) for project, days in self._sums(projects).items()}

    def _sums(self, projects: Collection[str] | None) -> dict[str, dict[int, float]]:
        now = self.clock()
        last = _day(now)  # a clock that was ahead may have left days behind it
        first = self.first_day()
        query, values = (_OF_ALL, {}) if projects is None else (_OF_SOME, {"projects": list(projects)})
        with self._transactions.begin() as connection:
            rows = connection.execute(query, {"first": first, "last": last, **values}).all()
        sums: dict[str, defaultdict[int, float]] = {}
        for row in rows:
            lease = LeaseTime(row.name, row.number, row.amount) if row.running else None
            owner = row.name if lease is None else lease.project
            if projects is not None and owner not in projects:
                continue
            days = [(row.number, row.amount)] if lease is None else _split(lease, until=now)
            for day, seconds in days:
                if day >= first:
                    sums.setdefault(owner, defaultdict(float))[day] += seconds
        return {name: dict(days) for name, days in sums.items()}


def _day(at: float) -> int:
    return int(at // DAY_SECONDS)


def _split(lease: LeaseTime, *, until: float) -> Iterator[tuple[int, float]]:
    """Yield the GPU seconds of a lease on each of its days; none if the clock was set back."""
    at = max(lease.since, until - _LONGEST_SECONDS)
    while at < until:
        end = min(until, (_day(at) + 1) * float(DAY_SECONDS))
        yield _day(at), (end - at) * lease.gpus
        at = end
