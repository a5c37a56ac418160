"""Workers as the board knows them, and their leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipway.requirements import Abilities
from slipway_coordinator.lifecycle.offers import Offer, WorkerReport


@dataclass
class Lease:
    """A worker's hold on an attempt since ``begun``. ``offer`` is None until the export has stated its offers."""

    worker: str
    epoch: int  # 0 until it is durable
    expires: float
    offer: Offer | None
    revoked: bool = False
    begun: float = 0.0


@dataclass
class KnownWorker:
    """A worker's last report, and when it was made.

    ``seen`` is of the board's clock; ``joined`` and ``reported`` are seconds since the epoch, and ``joined`` is the time of the first
    report since it is known.
    """

    report: WorkerReport
    abilities: Abilities
    seen: float
    joined: float = 0.0
    reported: float = 0.0

    @property
    def draining(self) -> bool:
        """Return whether it takes no new tasks now."""
        return self.report.draining

    @property
    def ending(self) -> bool:
        """Return whether it never takes a task again."""
        return self.report.ending


def rivals_of(worker: str, workers: Mapping[str, KnownWorker], leases: Iterable[Lease]) -> set[str]:
    """Return the other workers that have a free slot and are no busier than this one. One with an exclusive attempt has none.

    Leases count, not the last report: a worker that has just handed in a result is about to ask for the next task.
    """
    busy, exclusive = Counter[str](), set[str]()
    for lease in leases:
        busy[lease.worker] += 1
        if lease.offer is not None and lease.offer.exclusive:
            exclusive.add(lease.worker)
    return {
        name
        for name, known in workers.items()
        if name != worker and not known.draining and name not in exclusive and busy[name] < known.report.slots
        if busy[name] <= busy[worker]
    }
