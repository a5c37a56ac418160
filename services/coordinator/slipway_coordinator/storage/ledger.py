"""Changes of leases, each stored together with its event for the workflow, in one transaction.

The broker's memory may be behind, so every change reads the table itself: the first one wins. Each may be repeated if it is
unknown whether it was committed, and then returns again what was stored.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipway.planning.attempt_keys import AttemptKey
from slipway_coordinator.model.offers import Held, Offer
from slipway_coordinator.model.transitions import Event, EventKind
from slipway_coordinator.storage.inbox import Events, InboxEvent
from slipway_coordinator.storage.leases import LeaseRow, Leases, LeaseState

Told = list[InboxEvent | None]
"""Events stored for workflows; None where nothing was stored."""

_OPEN = (LeaseState.HELD, LeaseState.EXPIRED)


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

    def grant(self, offers: Sequence[Offer], worker: str) -> tuple[list[int | None], Told]:
        """Lease attempts to a worker; return the epoch of each, None for ended ones."""
        epochs: list[int | None] = []
        told: Told = []
        for offer in offers:
            epoch = self.leases.grant(offer.key, export=offer.export, worker=worker)
            epochs.append(epoch)
            if epoch is not None:
                told.append(self._leased(offer, worker, epoch, key=f"{offer.key}#{epoch}#leased"))
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
        return True, None if offer is None else self._leased(offer, worker, row.epoch, key=stamp)

    def _leased(self, offer: Offer, worker: str, epoch: int, *, key: str) -> InboxEvent | None:
        return self._store_event(offer, EventKind.LEASED, key=key, worker=worker, epoch=epoch)

    def _store_event(self, offer: Offer, kind: EventKind, *, key: str, **more: Any) -> InboxEvent | None:
        event = Event(kind=kind, time=time.time(), task=offer.task, attempt=offer.attempt, **more)
        return self.events.put(offer.export, event, key)
