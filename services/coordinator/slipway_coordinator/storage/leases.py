"""The table of leases (which worker may run which attempt, under which epoch), and changes of leases with their events.

Each change is stored together with its event for the workflow, in one transaction. The broker's memory may be behind, so every
change reads the table itself: the first one wins. A change may be repeated if it is unknown whether it was committed, and then
returns again what was stored.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from slipway.planning.references import AttemptKey
from slipway_coordinator.lifecycle.offers import Held, Offer
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.inbox import Events, InboxEvent
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.projects.gpu_seconds import GpuSeconds, LeaseTime
from slipway_coordinator.storage.schema import leases as _leases

# One statement for first and later grants. Epochs continue where those of forgotten exports ended: an export created again under
# the same name has attempts with the same keys, and must not be confused with the first.
_GRANTING = """
    INSERT INTO slipway_leases AS l (task, export, epoch, worker, state, gpus, since)
    VALUES (:task, :export, (SELECT highest FROM slipway_epochs) + 1, :worker, 'held', :gpus, :since)
    ON CONFLICT (task) DO UPDATE SET epoch = l.epoch + 1, worker = excluded.worker, state = excluded.state,
        gpus = excluded.gpus, since = excluded.since
    WHERE l.state <> 'ended'{and_not_on_gpus} RETURNING epoch
"""
_GET = sa.text("SELECT task, export, epoch, worker, state FROM slipway_leases WHERE task = :task")
_OF = sa.text("SELECT task, export, epoch, worker, state FROM slipway_leases WHERE export = :export")
_MOVING = """
    UPDATE slipway_leases AS l SET state = :state, gpus = gpus * :kept
    WHERE task = :task AND epoch = :epoch AND worker = :worker AND state IN ('held', 'expired'){and_not_on_gpus}
"""
_GRANT, _MOVE = (sa.text(text.format(and_not_on_gpus="")) for text in (_GRANTING, _MOVING))
# Most leases are on no GPUs. These need no look at the time that is to be added before they change, so these come first.
_GRANT_WITHOUT_TIME, _MOVE_WITHOUT_TIME = (
    sa.text(text.format(and_not_on_gpus=" AND NOT (l.gpus > 0 AND l.state = 'held')")) for text in (_GRANTING, _MOVING)
)
_END = sa.text("UPDATE slipway_leases SET state = 'ended', gpus = 0 WHERE task = :task")
_ON_GPUS = "SELECT task, export, gpus, since FROM slipway_leases WHERE gpus > 0 AND "
_OF_OWNER = sa.text(f"{_ON_GPUS} task = :task AND epoch = :epoch AND worker = :worker AND state = 'held'")
_HELD = sa.text(f"{_ON_GPUS} state = 'held'")
_OF_TASK = sa.text(f"{_ON_GPUS} task = :task AND state = 'held'")
_OF_EXPORT = sa.text(f"{_ON_GPUS} export = :export AND state = 'held'")
_ADDED = sa.text("UPDATE slipway_leases SET since = :since WHERE task = :task")
_RETURNS = sa.text("""
    UPDATE slipway_leases SET since = :since WHERE task = :task AND epoch = :epoch AND worker = :worker AND state = 'expired'
""")

_REMEMBER = sa.text("""
    UPDATE slipway_epochs SET highest = l.epoch
    FROM (SELECT MAX(epoch) AS epoch FROM slipway_leases WHERE export = :export) AS l WHERE l.epoch > highest
""")

Told = list[InboxEvent | None]
"""Events stored for workflows; None where nothing was stored."""


class LeaseState(StrEnum):
    """State of a lease.

    HELD: its worker may renew it. EXPIRED: its worker may adopt it again. RETURNED: its worker gave it up, so any worker may
    take the attempt. ENDED: the attempt has its result, or is not wanted any more.
    """

    HELD = "held"
    EXPIRED = "expired"
    RETURNED = "returned"
    ENDED = "ended"


_OPEN = (LeaseState.HELD, LeaseState.EXPIRED)


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease."""

    task: str
    export: str
    epoch: int
    worker: str
    state: LeaseState


class Leases:
    """The authoritative table of leases. All calls block for some milliseconds.

    Args:
        transactions: The database; see :class:`~slipway_coordinator.storage.database.Database`.
        gpu_seconds: Takes the time of leases on GPUs when they end.
    """

    def __init__(self, transactions: Transactions, gpu_seconds: GpuSeconds) -> None:
        self._transactions = transactions
        self._gpu_seconds = gpu_seconds

    def get(self, task: str) -> LeaseRow | None:
        """Return the lease of an attempt, if it was ever leased."""
        with self._transactions.begin() as connection:
            row = connection.execute(_GET, {"task": str(task)}).first()
        return None if row is None else _lease_row(row)

    def of(self, export: str) -> dict[str, LeaseRow]:
        """Return the leases of an export's attempts by key, for those ever leased."""
        with self._transactions.begin() as connection:
            return {row.task: _lease_row(row) for row in connection.execute(_OF, {"export": export})}

    def grant(self, task: str, *, export: str, worker: str, gpus: float = 0) -> int | None:
        """Lease an attempt to a worker with GPUs; return the epoch, which grows with every grant, or None if the lease has ended."""
        values = {
            "task": str(task),
            "export": export,
            "worker": worker,
            "gpus": gpus,
            "since": self._gpu_seconds.clock(),
        }
        with self._transactions.begin() as connection:
            epoch = connection.execute(_GRANT_WITHOUT_TIME, values).scalar()
            if epoch is None and self._add_time(connection, _OF_TASK, task=str(task)):
                epoch = connection.execute(_GRANT, values).scalar()
        return epoch

    def move(self, task: str, state: LeaseState, *, epoch: int, worker: str) -> bool:
        """Change the state of a lease; return False, and change nothing, if it is another's, returned or ended."""
        owner: dict[str, Any] = {"task": str(task), "epoch": epoch, "worker": worker}
        values = {"state": state.value, "kept": int(state in _OPEN), **owner}
        with self._transactions.begin() as connection:
            if state is LeaseState.HELD:  # the worker comes back: the time of its silence counts for nobody
                connection.execute(_RETURNS, {**owner, "since": self._gpu_seconds.clock()})
                return connection.execute(_MOVE, values).rowcount > 0
            if connection.execute(_MOVE_WITHOUT_TIME, values).rowcount:
                return True
            return self._add_time(connection, _OF_OWNER, **owner) and connection.execute(_MOVE, values).rowcount > 0

    def end(self, task: str) -> None:
        """End a lease, whichever worker holds it."""
        with self._transactions.begin() as connection:
            self._add_time(connection, _OF_TASK, task=str(task))
            connection.execute(_END, {"task": str(task)})

    def forget(self, export: str) -> None:
        """Delete the leases of an export, but remember their highest epoch."""
        with self._transactions.begin() as connection:
            self._add_time(connection, _OF_EXPORT, export=export)
            connection.execute(_REMEMBER, {"export": export})
            connection.execute(sa.delete(_leases).where(_leases.c.export == export))

    def expire_all(self) -> None:
        """Mark every held lease as expired, because all workers are known to be gone."""
        query = sa.update(_leases).where(_leases.c.state == LeaseState.HELD.value)
        with self._transactions.begin() as connection:
            connection.execute(query.values(state=LeaseState.EXPIRED.value))

    def end_outage(self, *, lease_seconds: float, workers_gone: bool) -> None:
        """Let leases on GPUs count on from now, after a time without a coordinator, of which ``lease_seconds`` count at most.

        Args:
            lease_seconds: How long a worker may be silent.
            workers_gone: All workers are known to be gone, so their leases expire.
        """
        with self._transactions.begin() as connection:
            self._add_time(connection, _HELD, until=self._gpu_seconds.read_alive_time(), more_seconds=lease_seconds)
            if workers_gone:
                self.expire_all()

    def _add_time(
        self,
        connection: sa.Connection,
        query: sa.TextClause,
        *,
        until: float | None = None,
        more_seconds: float = 0.0,
        **which: Any,
    ) -> bool:
        """Add the time of leases on GPUs, up to now or to some seconds after a time before; return whether there are any.

        From now on they count again.
        """
        now = self._gpu_seconds.clock()
        rows = connection.execute(query, which).all()
        for row in rows:
            end = now if until is None else min(now, max(until, row.since) + more_seconds)
            self._gpu_seconds.add(LeaseTime(row.export, row.gpus, row.since), until=end)
            connection.execute(_ADDED, {"task": row.task, "since": now})
        return bool(rows)


def _lease_row(row: sa.Row[Any]) -> LeaseRow:
    return LeaseRow(task=row.task, export=row.export, epoch=row.epoch, worker=row.worker, state=LeaseState(row.state))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Changes of leases. All calls block for some milliseconds, and join an open transaction.

    Attributes:
        leases: The table of leases.
        events: The table of events.
    """

    leases: Leases
    events: Events

    def settle(
        self,
        export: str,
        offers: Mapping[AttemptKey, Offer],
        *,
        new: Collection[AttemptKey],
        revoked: Collection[AttemptKey],
    ) -> tuple[dict[str, LeaseRow], Told]:
        """End leases of attempts that are not offered, and store events for ``new`` attempts already leased; return the leases before."""
        rows = self.leases.of(export)
        for key in sorted(rows.keys() - offers.keys()):
            if rows[key].state is not LeaseState.ENDED:
                self.leases.end(key)
        told: Told = []
        for key in new:
            row = rows.get(key)
            if row is not None and row.state in {LeaseState.HELD, LeaseState.ENDED}:
                continue
            if key in revoked:
                told.append(self._store_event(offers[key], EventKind.CANCELLED, key=f"{key}#revoked"))
            elif row is not None:
                told.append(self._store_event(offers[key], EventKind.LEASE_LOST, key=f"{key}#{row.epoch}#lost"))
        return rows, told

    def grant(self, offers: Sequence[Offer], worker: str, *, gpus: float = 0) -> tuple[list[int | None], Told]:
        """Lease attempts to a worker with so many GPUs for each; return the epoch of each, None for ended ones."""
        epochs: list[int | None] = []
        told: Told = []
        for offer in offers:
            used = gpus if offer.requirements.uses_gpu else 0
            epoch = self.leases.grant(offer.key, export=offer.export, worker=worker, gpus=used)
            epochs.append(epoch)
            if epoch is not None:
                told.append(self._store_leased(offer, worker, epoch, key=f"{offer.key}#{epoch}#leased"))
        return epochs, told

    def complete(self, worker: str, held: Held, event: Event) -> tuple[bool, InboxEvent | None]:
        """Store a result, or the return of an attempt; the first value is False if the lease is another's."""
        state = LeaseState.RETURNED if event.kind is EventKind.CANCELLED else LeaseState.ENDED
        stamp = f"{held.task}#{held.epoch}#completed"
        if self.leases.move(held.task, state, epoch=held.epoch, worker=worker):
            return True, self.events.put(held.export, event, stamp)
        row = self.leases.get(held.task)
        if row is None or row.epoch != held.epoch or row.worker != worker:
            return False, None
        return True, self.events.find(stamp)

    def expire(
        self, worker: str, held: Held, offer: Offer | None, *, revoked: bool, departed: bool = False
    ) -> tuple[bool, InboxEvent | None]:
        """End the lease of a worker that departed or fell silent; the first value is False if it is not held any more."""
        if not self.leases.move(held.task, LeaseState.EXPIRED, epoch=held.epoch, worker=worker):
            return False, None
        if offer is None:
            return True, None
        if revoked:
            return True, self._store_event(offer, EventKind.CANCELLED, key=f"{held.task}#revoked")
        return True, self._store_event(
            offer, EventKind.LEASE_LOST, key=f"{held.task}#{held.epoch}#lost", departed=departed
        )

    def adopt(self, worker: str, held: Held, offer: Offer | None) -> tuple[bool, InboxEvent | None]:
        """Renew a lease for its owner, even an expired one; the first value is False if it is another's, returned or ended."""
        row = self.leases.get(held.task)
        if row is None or row.worker != worker or row.epoch != held.epoch or row.state not in _OPEN:
            return False, None
        if row.state is LeaseState.HELD:
            return True, None
        self.leases.move(held.task, LeaseState.HELD, epoch=held.epoch, worker=worker)
        stamp = f"{held.task}#{row.epoch}#adopted{time.time_ns()}"
        return True, None if offer is None else self._store_leased(offer, worker, row.epoch, key=stamp)

    def _store_leased(self, offer: Offer, worker: str, epoch: int, *, key: str) -> InboxEvent | None:
        return self._store_event(offer, EventKind.LEASED, key=key, worker=worker, epoch=epoch)

    def _store_event(self, offer: Offer, kind: EventKind, *, key: str, **more: Any) -> InboxEvent | None:
        event = Event(kind=kind, time=time.time(), task=offer.task, attempt=offer.attempt, **more)
        return self.events.put(offer.export, event, key)
