"""What the coordinator knows of its work at this moment: what waits, who holds what, which workers there are. In memory only.

It decides who is asked, and changes at once; what counts is in the tables of leases. After a restart it is empty.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slipway.requirements import NO_GPU, Abilities
from slipway_coordinator.broker.waiting import Waiting
from slipway_coordinator.model.offers import Granted, Held, Load, Offer, WorkerReport, memory_limit


@dataclass
class Lease:
    """Who holds an attempt until when. ``offer`` is None while its export has not said what it wants."""

    worker: str
    epoch: int  # 0 until it is durable
    expires: float
    offer: Offer | None
    revoked: bool = False


@dataclass
class KnownWorker:
    """What a worker said of itself, and when; ``draining`` stands for taking no new tasks, ``ending`` for doing so until it is gone."""

    abilities: Abilities
    seen: float
    draining: bool = False
    ending: bool = False


@dataclass
class Wanted:
    """What an export wants, and which of that has its result, of which the workflow will hear."""

    offers: Mapping[str, Offer] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


@dataclass
class Board:
    """Offers, leases and workers of one coordinator, changed on one event loop.

    Attributes:
        ttl: Seconds a lease lives without a report.
        clock: Seconds; only differences matter.
        waiting: Offers that nobody holds.
        held: Leases by the key of their attempt.
        workers: Those that reported lately, by name.
        wanted: What every export wants that has not ended.
    """

    ttl: float
    clock: Callable[[], float]
    waiting: Waiting = field(default_factory=Waiting)
    held: dict[str, Lease] = field(default_factory=dict)
    workers: dict[str, KnownWorker] = field(default_factory=dict)
    wanted: dict[str, Wanted] = field(default_factory=dict)
    _offered_since: dict[str, float] = field(default_factory=dict)

    def hear(self, report: WorkerReport) -> None:
        """Know a worker by what it says of itself; one that ends and runs nothing is not there any more."""
        if report.ending and not report.running:
            self.workers.pop(report.worker, None)
            return
        self.workers[report.worker] = KnownWorker(report.abilities, self.clock(), report.draining, report.ending)

    # What happens to an attempt

    def offer(self, offer: Offer) -> None:
        """Let an offer wait for a worker."""
        self.waiting.add(offer, now=time.time())
        self._offered_since[offer.key] = self.clock()

    def withdraw(self, key: str) -> Offer | None:
        """Take an offer away; None when it does not wait."""
        self._offered_since.pop(key, None)
        return self.waiting.remove(key)

    def hold(self, key: str, worker: str, *, epoch: int, offer: Offer | None, revoked: bool = False) -> None:
        """Note that a worker holds an attempt, as if it had just reported it."""
        self.held[key] = Lease(worker, epoch, self.expiry(), offer, revoked)

    def choose(self, report: WorkerReport, *, free: int, busy: int) -> list[Offer]:
        """Offers for the free slots of a worker that runs ``busy`` attempts, held by it from now on, though not yet durably."""
        chosen: list[Offer] = []
        while free > 0 and not self._has_exclusive(report.worker):
            offer = self.waiting.first(report.worker, self._ready(), running=self._running_by_project())
            if offer is None or (offer.exclusive and busy):
                break  # an exclusive one waits for the worker to become idle, or it would wait for ever
            chosen.append(offer)
            self.waiting.remove(offer.key)
            self.hold(offer.key, report.worker, epoch=0, offer=offer)
            free, busy = free - 1, busy + 1
        return chosen

    def waited(self, key: str) -> float:
        """Seconds since an attempt was offered, which ends here."""
        now = self.clock()
        return now - self._offered_since.pop(key, now)

    def let_go(self, key: str, lease: Lease) -> bool:
        """Forget a lease if it is still the one of its attempt."""
        if self.held.get(key) is not lease:
            return False
        del self.held[key]
        return True

    def forget_silent(self) -> None:
        """Forget workers that reported nothing for two lives of a lease."""
        before = self.clock() - 2 * self.ttl
        for worker in [name for name, known in self.workers.items() if known.seen < before]:
            del self.workers[worker]

    # What is known

    def expiry(self) -> float:
        """When a lease that is renewed now will expire."""
        return self.clock() + self.ttl

    def is_known(self, key: str) -> bool:
        """Whether an attempt waits or is held."""
        return key in self.held or key in self.waiting

    def is_ending(self, worker: str) -> bool:
        """Whether a worker said that it was told to end."""
        known = self.workers.get(worker)
        return known is not None and known.ending

    def keeps(self, worker: str, held: Held) -> bool:
        """Whether a worker shall go on with what it runs."""
        lease = self.held.get(held.task)
        return lease is not None and (lease.worker, lease.epoch) == (worker, held.epoch) and not lease.revoked

    def wanted_offer(self, key: str) -> Offer | None:
        """The offer of an attempt, if its export wants it."""
        wanted = self.wanted.get(key.partition(":")[0])
        return None if wanted is None else wanted.offers.get(key)

    def unknown_to(self, report: WorkerReport) -> list[Granted]:
        """Leases of a worker that it does not report: the answer that granted them was lost, so they are given again.

        Those it has no room for expire, and go to others.
        """
        if report.draining:
            return []
        reported = {held.task for held in report.running}
        again: list[Granted] = []
        for key, lease in self.held.items():
            if len(again) >= report.free_slots:
                break
            if lease.worker != report.worker or key in reported or not lease.epoch:
                continue
            if lease.offer is not None and not lease.revoked:
                lease.expires = self.expiry()
                again.append(Granted(lease.offer, lease.epoch, memory_limit(lease.offer, report)))
        return again

    def late(self) -> Sequence[tuple[str, Lease]]:
        """Leases that have expired."""
        now = self.clock()
        return [(key, lease) for key, lease in self.held.items() if lease.epoch and lease.expires < now]

    def load(self) -> Load:
        """What waits, runs and serves now; may be called from any thread."""
        now = self.clock()
        since = dict(self._offered_since)
        return Load(
            waiting=tuple(
                (offer.stage, max(now - since.get(offer.key, now), 0.0)) for offer in list(self.waiting.values())
            ),
            leased=tuple(lease.offer.stage for lease in list(self.held.values()) if lease.offer is not None),
            served=tuple(stage for worker in list(self.workers.values()) for stage in worker.abilities.stages),
        )

    def demand(self, stages: Collection[str], *, gpu_architecture: str = "") -> int:
        """How many workers of some stages there should be: one for each attempt that waits or runs, and while any waits, those that
        take no tasks and run none, as they are there without being of use, unless they end.

        Args:
            stages: Names of the stages that such a worker runs.
            gpu_architecture: Counts, of those that wait, only the ones that workers with such a GPU can take, and of those that
                run, the ones on such workers and on workers that did not report yet after a restart. ``none`` stands for
                workers without a GPU.
        """
        waiting = sum(
            offer.stage in stages and offer.requirements.possible_on(gpu_architecture)
            for offer in self.waiting.values()
        )
        owners = [
            lease.worker for lease in self.held.values() if lease.offer is not None and lease.offer.stage in stages
        ]
        pool = {
            name: worker
            for name, worker in self.workers.items()
            if not gpu_architecture or (worker.abilities.gpu_architecture or NO_GPU) == gpu_architecture
        }
        running = sum(owner in pool or owner not in self.workers for owner in owners)
        of_no_use = sum(
            worker.draining
            and not worker.ending
            and not worker.abilities.stages.isdisjoint(stages)
            and name not in owners
            for name, worker in pool.items()
        )
        return waiting + running + (of_no_use if waiting else 0)

    def unserved(self, *, longer_than: float, now_ready: bool = False) -> list[Offer]:
        """Offers that wait for longer than this many seconds while no known worker can take them.

        Args:
            longer_than: Seconds.
            now_ready: Count only workers that take new tasks at this moment.
        """
        now = self.clock()
        late = [offer for key, offer in self.waiting.items() if self._offered_since[key] + longer_than < now]
        workers = self._ready() if now_ready else {name: one.abilities for name, one in self.workers.items()}
        taken = {call: any(call.can(worker) for worker in workers.values()) for call in {o.call for o in late}}
        return [offer for offer in late if not taken[offer.call]]

    def lacking(self, offer: Offer) -> str:
        """What is missing where no known worker can take an offer, or none takes it now."""
        return offer.call.lacking(worker.abilities for worker in self.workers.values())

    def _ready(self) -> dict[str, Abilities]:
        return {name: worker.abilities for name, worker in self.workers.items() if not worker.draining}

    def _running_by_project(self) -> Counter[str]:
        return Counter(lease.offer.project for lease in self.held.values() if lease.offer is not None)

    def _has_exclusive(self, worker: str) -> bool:
        return any(
            lease.offer is not None and lease.offer.exclusive for lease in self.held.values() if lease.worker == worker
        )
