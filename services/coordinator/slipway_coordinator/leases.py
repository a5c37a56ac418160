"""The durable part of leases: who may run which attempt, and with which epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from slipway_coordinator.schema import leases as _leases


class LeaseState(StrEnum):
    """Where a lease is. A HELD one may be renewed, an EXPIRED one taken up again by its owner; a RETURNED one is free for
    everybody, its owner having given it up; an ENDED one has its result.
    """

    HELD = "held"
    EXPIRED = "expired"
    RETURNED = "returned"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease."""

    task: str
    export: str
    epoch: int
    worker: str
    state: LeaseState


class Leases:
    """The table of leases. All calls block for some milliseconds.

    Args:
        engine: The database; see :class:`~slipway_coordinator.database.Database`.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def get(self, task: str) -> LeaseRow | None:
        """The lease of an attempt, if it was ever leased."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(_leases).where(_leases.c.task == task)).mappings().first()
        return None if row is None else _lease_row(row)

    def grant(self, task: str, *, export: str, worker: str) -> int:
        """Lease an attempt to a worker; returns the epoch, which grows with every grant."""
        values = {"export": export, "worker": worker, "state": LeaseState.HELD.value}
        with self._engine.begin() as connection:
            updated = connection.execute(
                sa.update(_leases).where(_leases.c.task == task).values(epoch=_leases.c.epoch + 1, **values)
            )
            if not updated.rowcount:
                connection.execute(sa.insert(_leases).values(task=task, epoch=1, **values))
                return 1
            return connection.execute(sa.select(_leases.c.epoch).where(_leases.c.task == task)).scalar_one()

    def set_state(self, task: str, state: LeaseState) -> None:
        """Change the state of a lease that exists."""
        with self._engine.begin() as connection:
            connection.execute(sa.update(_leases).where(_leases.c.task == task).values(state=state.value))

    def end(self, export: str, *, keep: Iterable[str]) -> None:
        """End all leases of an export except those of the attempts to keep."""
        query = sa.update(_leases).where(_leases.c.export == export, _leases.c.task.not_in(list(keep)))
        with self._engine.begin() as connection:
            connection.execute(query.values(state=LeaseState.ENDED.value))

    def expire_all(self) -> None:
        """Mark every held lease as expired: its worker is known to be gone."""
        query = sa.update(_leases).where(_leases.c.state == LeaseState.HELD.value)
        with self._engine.begin() as connection:
            connection.execute(query.values(state=LeaseState.EXPIRED.value))


def _lease_row(row: Any) -> LeaseRow:
    return LeaseRow(
        task=row["task"],
        export=row["export"],
        epoch=row["epoch"],
        worker=row["worker"],
        state=LeaseState(row["state"]),
    )
