"""The table of leases: which worker may run which attempt, and under which epoch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.schema import leases as _leases


class LeaseState(StrEnum):
    """State of a lease.

    HELD: its worker may renew it. EXPIRED: its worker may adopt it again. RETURNED: its worker gave it up, so any worker may
    take the attempt. ENDED: the attempt has its result, or is not wanted any more.
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


# One statement for first and later grants. Epochs continue where those of forgotten exports ended: an export created again under
# the same name has attempts with the same keys, and must not be confused with the first.
_GRANT = sa.text("""
    INSERT INTO slipway_leases AS l (task, export, epoch, worker, state)
    VALUES (:task, :export, (SELECT highest FROM slipway_epochs) + 1, :worker, 'held')
    ON CONFLICT (task) DO UPDATE SET epoch = l.epoch + 1, worker = excluded.worker, state = excluded.state
    WHERE l.state <> 'ended' RETURNING epoch
""")
_GET = sa.text("SELECT task, export, epoch, worker, state FROM slipway_leases WHERE task = :task")
_OF = sa.text("SELECT task, export, epoch, worker, state FROM slipway_leases WHERE export = :export")
_MOVE = sa.text("""
    UPDATE slipway_leases SET state = :state
    WHERE task = :task AND epoch = :epoch AND worker = :worker AND state IN ('held', 'expired')
""")
_END = sa.text("UPDATE slipway_leases SET state = 'ended' WHERE task = :task")

_REMEMBER = sa.text("""
    UPDATE slipway_epochs SET highest = l.epoch
    FROM (SELECT MAX(epoch) AS epoch FROM slipway_leases WHERE export = :export) AS l WHERE l.epoch > highest
""")


class Leases:
    """The authoritative table of leases. All calls block for some milliseconds.

    Args:
        transactions: The database; see :class:`~slipway_coordinator.storage.database.Database`.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def get(self, task: str) -> LeaseRow | None:
        """Return the lease of an attempt, if it was ever leased."""
        with self._transactions.begin() as connection:
            row = connection.execute(_GET, {"task": str(task)}).first()
        return None if row is None else _lease_row(row)

    def of(self, export: str) -> dict[str, LeaseRow]:
        """Return the leases of an export's attempts by key, for those ever leased."""
        with self._transactions.begin() as connection:
            return {row.task: _lease_row(row) for row in connection.execute(_OF, {"export": export})}

    def grant(self, task: str, *, export: str, worker: str) -> int | None:
        """Lease an attempt to a worker; return the epoch, which grows with every grant, or None if the lease has ended."""
        with self._transactions.begin() as connection:
            return connection.execute(_GRANT, {"task": str(task), "export": export, "worker": worker}).scalar()

    def move(self, task: str, state: LeaseState, *, epoch: int, worker: str) -> bool:
        """Change the state of a lease; return False, and change nothing, if it is another's, returned or ended."""
        values = {"task": str(task), "state": state.value, "epoch": epoch, "worker": worker}
        with self._transactions.begin() as connection:
            return connection.execute(_MOVE, values).rowcount > 0

    def end(self, task: str) -> None:
        """End a lease, whichever worker holds it."""
        with self._transactions.begin() as connection:
            connection.execute(_END, {"task": str(task)})

    def forget(self, export: str) -> None:
        """Delete the leases of an export, but remember their highest epoch."""
        with self._transactions.begin() as connection:
            connection.execute(_REMEMBER, {"export": export})
            connection.execute(sa.delete(_leases).where(_leases.c.export == export))

    def expire_all(self) -> None:
        """Mark every held lease as expired, because all workers are known to be gone."""
        query = sa.update(_leases).where(_leases.c.state == LeaseState.HELD.value)
        with self._transactions.begin() as connection:
            connection.execute(query.values(state=LeaseState.EXPIRED.value))


def _lease_row(row: sa.Row[Any]) -> LeaseRow:
    return LeaseRow(task=row.task, export=row.export, epoch=row.epoch, worker=row.worker, state=LeaseState(row.state))
