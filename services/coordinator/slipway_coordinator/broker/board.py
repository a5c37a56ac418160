"""Offers, leases and workers at this moment, and the queue of waiting offers; in memory only.

The board decides which worker gets an offer and changes at once; the lease tables are authoritative. After a restart it is empty.
Order of the queue: projects take turns by their weights (:mod:`slipway_coordinator.broker.shares`); within a project the higher
priority goes first, then the oldest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slipway.contracts.engine import is_worker_of
from slipway.planning.references import AttemptKey
from slipway.requirements import NO_GPU, Abilities
from slipway.security.access.projects import ALIKE, CurrentProjects
from slipway_coordinator.broker.locality import Locality
from slipway_coordinator.broker.shares import Shares
from slipway_coordinator.broker.waiting import Waiting
from slipway_coordinator.broker.workers import KnownWorker, Lease, rivals_of
from slipway_coordinator.lifecycle.offers import Granted, Held, Load, Offer, ProjectLoad, WorkerReport, memory_limit
from slipway_coordinator.lifecycle.quotas import project_of_export

_MOST_IMPORTED = 10_000
"""Addresses that are remembered as imported."""
_LONGEST_WAIT_SECONDS = 3600.0
"""How long an import keeps others of its addresses waiting."""


@dataclass(slots=True)
class ExportOffers:
    """Offers, revoked attempts, attempts awaiting their result, which attempt made an artifact, by its digest, and who held one last."""

    offers: Mapping[AttemptKey, Offer] = field(default_factory=dict)
    revoked: frozenset[AttemptKey] = frozenset()
    done: set[AttemptKey] = field(default_factory=set)
    made_by: dict[str, AttemptKey] = field(default_factory=dict)
    holders: dict[AttemptKey, str] = field(default_factory=dict)


@dataclass
class Board:
    """Offers, leases and workers of one coordinator, changed on one event loop.

    Attributes:
        ttl: Seconds a lease lives without a report.
        clock: Seconds; only differences matter.
        projects: Returns the weights of projects.
        engine: Name of the engine that starts a worker for each attempt; empty if workers pull any.
        waiting: Offers that no worker holds.
        held: Leases by the key of their attempt.
        workers: Workers that reported recently, by name.
        wanted: Offers of every export that has not ended.
        unfit: Why the last worker that an engine started for an attempt did not get it.
        locality: Which workers hold inputs.
    """

    ttl: float
    clock: Callable[[], float]
    projects: CurrentProjects = lambda: ALIKE
    engine: str = ""
    waiting: Waiting = field(default_factory=Waiting)
    held: dict[AttemptKey, Lease] = field(default_factory=dict)
    workers: dict[str, KnownWorker] = field(default_factory=dict)
    wanted: dict[str, ExportOffers] = field(default_factory=dict)
    unfit: dict[AttemptKey, str] = field(default_factory=dict)
    locality: Locality = field(init=False)
    _offered_since: dict[AttemptKey, float] = field(default_factory=dict)
    _imported: dict[str, None] = field(default_factory=dict)  # addresses, the oldest first
    _shares: dict[frozenset[str], Shares] = field(default_factory=dict)  # by the stages of a kind of workers

    def __post_init__(self) -> None:
        self.locality = Locality(self.clock)

    def record_report(self, report: WorkerReport) -> None:
        """Record a worker's report; forget a worker that is ending and runs nothing."""
        if report.ending and not report.running:
            self.workers.pop(report.worker, None)
            return
        self.locality.note_report(report.worker, report.held)
        now, known = time.time(), self.workers.get(report.worker)
        joined = now if known is None else known.joined
        self.workers[report.worker] = KnownWorker(report, report.abilities, self.clock(), joined, now)

    # Changes of an attempt

    def offer(self, offer: Offer) -> None:
        """Put an offer in the queue."""
        self.waiting.add(offer, now=time.time())
        self._offered_since[offer.key] = self.clock()

    def withdraw(self, key: AttemptKey) -> Offer | None:
        """Remove an offer from the queue and return it; None if it was not waiting."""
        self._offered_since.pop(key, None)
        return self.waiting.remove(key)

    def hold(self, key: AttemptKey, worker: str, *, epoch: int, offer: Offer | None) -> None:
        """Record that a worker holds an attempt, as if it had just reported it."""
        wanted = self.wanted.get(key.export)
        revoked = wanted is not None and key in wanted.revoked
        if wanted is not None:
            wanted.holders[key] = worker
        self.locality.note_granted(worker, key)
        self.held[key] = Lease(worker, epoch, self.expiry(), offer, revoked, self.clock())

    def choose(self, report: WorkerReport, *, free: int, busy: int) -> list[Offer]:
        """Choose offers for a worker's free slots and mark them as held, not yet durably. It runs ``busy`` attempts already."""
        chosen: list[Offer] = []
        if free <= 0 or not self.waiting:
            return chosen
        if report.only_task is not None or self.engine:
            return self._choose_only(report)
        shares = self._shares.setdefault(report.stages, Shares())
        weight, ready, running = self.projects().weight, self.ready(), self._running_by_project(report.stages)
        rivals = rivals_of(report.worker, self.workers, self.held.values()) if self.locality.matters else ()
        near = self.locality.beside(report.worker, rivals)
        while free > 0 and not self._has_exclusive(report.worker):
            turns = shares.order(self.waiting.projects, running, weight)
            offer = self.waiting.first(report.worker, ready, projects=turns, importing=self.importing(), near=near)
            if offer is None or (offer.exclusive and busy):
                break  # reserve the idle moment for the exclusive offer, or it would wait for ever
            chosen.append(offer)
            shares.charge(offer.project, weight(offer.project))
            running[offer.project] += 1
            self.waiting.remove(offer.key)
            self.locality.take(offer.key)
            self.hold(offer.key, report.worker, epoch=0, offer=offer)
            free, busy = free - 1, busy + 1
        return chosen

    def _choose_only(self, report: WorkerReport) -> list[Offer]:
        """Choose the attempt for which an engine started this worker. The stage itself reports best what its node lacks."""
        offer = self.waiting.get(report.only_task) if report.only_task is not None else None
        if offer is None or offer.stage not in report.stages:
            return []
        self.waiting.remove(offer.key)
        self.hold(offer.key, report.worker, epoch=0, offer=offer)
        return [offer]

    def refuse(self, report: WorkerReport) -> bool:
        """Return whether an engine's worker must not get its attempt, whose parameters its version does not know; note why."""
        offer = self.waiting.get(report.only_task) if report.only_task is not None else None
        if offer is None or not report.abilities.unknown(offer.stage, offer.placement.parameters):
            return False
        self.unfit[offer.key] = offer.placement.lacking([report.abilities])
        return True

    def end_wait(self, key: AttemptKey) -> float:
        """Return the seconds since an attempt was offered, and stop counting."""
        now = self.clock()
        return now - self._offered_since.pop(key, now)

    def note_imported(self, offer: Offer) -> None:
        """Remember an import's addresses: other imports need not wait for them any more."""
        for address in offer.addresses:
            self._imported.pop(address, None)
            self._imported[address] = None
        while len(self._imported) > _MOST_IMPORTED:
            del self._imported[next(iter(self._imported))]

    def drop_lease(self, key: AttemptKey, lease: Lease) -> bool:
        """Forget a lease if it is still the current one of its attempt."""
        if self.held.get(key) is not lease:
            return False
        del self.held[key]
        return True

    def forget_silent(self) -> None:
        """Forget workers that have not reported for two lease lifetimes, and turns that decide nothing any more."""
        before = self.clock() - 2 * self.ttl
        for worker in [name for name, known in self.workers.items() if known.seen < before]:
            del self.workers[worker]
        self.locality.forget(self.workers, self.waiting)
        kinds = {worker.report.stages for worker in self.workers.values()}
        self._shares = {stages: shares for stages, shares in self._shares.items() if stages in kinds}
        for shares in self._shares.values():
            shares.forget(self.waiting.projects)

    # Look-ups

    def expiry(self) -> float:
        """Return when a lease renewed now will expire."""
        return self.clock() + self.ttl

    def is_known(self, key: AttemptKey) -> bool:
        """Return whether an attempt waits or is held."""
        return key in self.held or key in self.waiting

    def importing(self) -> set[str]:
        """Return the addresses that workers are importing now for the first time since this process began.

        Another import of them would fetch the same files again: it waits, and then finds them in the store. It does not wait
        for ever, because the other one may be of another project, and slow for other reasons.
        """
        since = self.clock() - _LONGEST_WAIT_SECONDS
        leases = [lease for lease in self.held.values() if lease.offer is not None and lease.begun > since]
        return set[str]().union(*(lease.offer.addresses for lease in leases if lease.offer)) - self._imported.keys()

    def held_back_offers(self, *, longer_than: float) -> list[Offer]:
        """Return offers that have waited this many seconds, and now wait for another task's import."""
        before, importing = self.clock() - longer_than, self.importing()
        return [
            offer
            for key, offer in self.waiting.items()
            if self.waiting.is_held_back(key, importing) and self._offered_since[key] < before
        ]

    def is_latest(self, report: WorkerReport) -> bool:
        """Return whether a report is its worker's last one."""
        known = self.workers.get(report.worker)
        return known is not None and known.report is report

    def is_ending(self, worker: str) -> bool:
        """Return whether a worker reported that it is shutting down."""
        known = self.workers.get(worker)
        return known is not None and known.ending

    def should_continue(self, worker: str, held: Held) -> bool:
        """Return whether a worker should continue an attempt."""
        lease = self.held.get(held.task)
        return lease is not None and (lease.worker, lease.epoch) == (worker, held.epoch) and not lease.revoked

    def is_wanted(self, key: AttemptKey) -> bool:
        """Return whether an attempt should run, or run on. It is unknown until its export was resumed."""
        wanted = self.wanted.get(key.export)
        return wanted is not None and key in wanted.offers and key not in wanted.revoked and key not in wanted.done

    def was_taken_by(self, key: AttemptKey, submission_id: str) -> bool:
        """Return whether the worker that held an attempt last, or holds it, is that of an engine's submission."""
        wanted = self.wanted.get(key.export)
        return wanted is not None and is_worker_of(wanted.holders.get(key, ""), submission_id)

    def cannot_take(self, report: WorkerReport) -> bool:
        """Return whether a worker of one task waits for an attempt that it will never get."""
        key = report.only_task
        if key is None or report.running or key.export not in self.wanted:
            return False
        lease = self.held.get(key)
        return not self.is_wanted(key) if lease is None else lease.worker != report.worker

    def wanted_offer(self, key: AttemptKey) -> Offer | None:
        """Return the offer of an attempt if its export still wants it."""
        wanted = self.wanted.get(key.export)
        return None if wanted is None else wanted.offers.get(key)

    def unreported_leases(self, report: WorkerReport) -> list[Granted]:
        """Return leases of a worker that it does not report, to send them again: the response that granted them was lost.

        Leases it has no free slot for expire and go to other workers.
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

    def expired_leases(self) -> Sequence[tuple[AttemptKey, Lease]]:
        """Return leases that have expired."""
        now = self.clock()
        return [(key, lease) for key, lease in self.held.items() if lease.epoch and lease.expires < now]

    def offered_since(self) -> dict[AttemptKey, float]:
        """Return a copy of the times, by the board's clock, at which the offers that wait were offered."""
        return dict(self._offered_since)

    def load(self) -> Load:
        """Return what waits and runs now, and the workers' stages. Safe from any thread."""
        now = self.clock()
        since = dict(self._offered_since)
        return Load(
            waiting=tuple(
                (offer.stage, max(now - since.get(offer.key, now), 0.0)) for offer in list(self.waiting.values())
            ),
            leased=tuple(lease.offer.stage for lease in list(self.held.values()) if lease.offer is not None),
            served=tuple(stage for worker in list(self.workers.values()) for stage in worker.abilities.stages),
        )

    def load_by_project(self) -> ProjectLoad:
        """Return what each project has now, by its name in metrics. Safe from any thread."""
        label = self.projects().label
        waiting, running, exports = Counter[str](), Counter[str](), Counter[str]()
        for project, count in self.waiting.count_by_project().items():
            waiting[label(project)] += count
        for lease in list(self.held.values()):
            if lease.offer is not None:
                running[label(lease.offer.project)] += 1
        for name in list(self.wanted):
            exports[label(project_of_export(name))] += 1
        return ProjectLoad(waiting, running, exports)

    def demand(self, stages: Collection[str], *, gpu_architecture: str = "") -> int:
        """Return how many workers of some stages there should be.

        One for each attempt that waits, or runs on a worker that is not shutting down: such a worker ends by itself after its
        task, and is no replica any more. While any waits, also count idle draining workers (unless they are shutting
        down): they exist but take no tasks.

        Args:
            stages: Names of the stages that such a worker runs.
            gpu_architecture: Count only waiting attempts that workers with this GPU can take, and only running attempts on such
                workers or on workers that have not reported since a restart. ``none`` stands for workers without a GPU.
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
        running = sum(not pool[owner].ending if owner in pool else owner not in self.workers for owner in owners)
        of_no_use = sum(
            worker.draining
            and not worker.ending
            and not worker.abilities.stages.isdisjoint(stages)
            and name not in owners
            for name, worker in pool.items()
        )
        return waiting + running + (of_no_use if waiting else 0)

    def unserved_offers(self, *, longer_than: float, now_ready: bool = False) -> list[Offer]:
        """Return offers that have waited too long and that no known worker can take.

        Args:
            longer_than: Seconds of waiting.
            now_ready: Consider only workers that take new tasks at this moment.
        """
        now = self.clock()
        late = [offer for key, offer in self.waiting.items() if self._offered_since[key] + longer_than < now]
        workers = self.ready() if now_ready else {name: one.abilities for name, one in self.workers.items()}
        taken = {one: any(one.can(worker) for worker in workers.values()) for one in {each.placement for each in late}}
        return [offer for offer in late if not taken[offer.placement]]

    def ready(self) -> dict[str, Abilities]:
        """Return the abilities of the workers that take new tasks at this moment, by name."""
        return {name: worker.abilities for name, worker in self.workers.items() if not worker.draining}

    def lacking(self, offer: Offer) -> str:
        """Describe what workers lack for an offer that none of them can take, or takes now."""
        return offer.placement.lacking(worker.abilities for worker in self.workers.values())

    def _running_by_project(self, stages: frozenset[str]) -> Counter[str]:
        """Count attempts on workers of these stages; where a worker has not reported since a restart, its task's stage decides."""
        running = Counter[str]()
        for lease in self.held.values():
            known = self.workers.get(lease.worker)
            if lease.offer is not None and (
                lease.offer.stage in stages if known is None else known.report.stages == stages
            ):
                running[lease.offer.project] += 1
        return running

    def _has_exclusive(self, worker: str) -> bool:
        return any(
            lease.offer is not None and lease.offer.exclusive for lease in self.held.values() if lease.worker == worker
        )
