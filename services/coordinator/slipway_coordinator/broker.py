"""Who runs what: an in-memory view over durable leases.

The workflow says what is wanted (:meth:`Broker.set_offers`), workers say what they run and have room for
(:meth:`Broker.synchronize`), and whatever follows from that is told to the workflow as an :class:`Event`. A lease has an
epoch that grows with every grant, so what a former owner hands in late is recognised and refused. After a restart the
memory is empty; workers present what they run and are adopted, which is why nobody's lease is ended in the first
``ttl`` seconds.

Memory decides who is asked, and changes at once; the :class:`Ledger` decides what counts, and changes in the same order a
little later. Nobody waits for another's transaction: those of one worker, and those about what one export wants, take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from slipway import metrics
from slipway.errors import ServiceError
from slipway.telemetry import within
from slipway_coordinator.graph import Event, EventKind
from slipway_coordinator.inbox import Message
from slipway_coordinator.journal import Journal
from slipway_coordinator.leases import LeaseRow, LeaseState
from slipway_coordinator.ledger import Ledger
from slipway_coordinator.matching import NO_GPU, Abilities
from slipway_coordinator.offers import Answer, Granted, Held, Load, Offer, WorkerReport, memory_limit
from slipway_coordinator.waiting import Waiting

log = logging.getLogger("slipway.coordinator.broker")

T = TypeVar("T")


@dataclass
class _Lease:
    worker: str
    epoch: int  # 0 until it is durable
    expires: float
    offer: Offer | None
    revoked: bool = False


@dataclass
class _Worker:
    abilities: Abilities
    seen: float
    draining: bool = False


@dataclass
class _Wanted:
    """What an export wants, and which of that has its result, of which the workflow will hear."""

    offers: Mapping[str, Offer] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


@dataclass
class Broker:
    """Offers and leases of one coordinator. All methods run on one event loop.

    Attributes:
        ledger: Durable part.
        journal: Carries changes of the ledger out.
        deliver: Hands events that were stored to the workflows.
        ttl: Seconds a lease lives without a report.
        clock: Seconds; only differences matter.
    """

    ledger: Ledger
    journal: Journal
    deliver: Callable[[Message | None], None]
    ttl: float = 30.0
    clock: Callable[[], float] = time.monotonic
    _offers: Waiting = field(default_factory=Waiting)
    _held: dict[str, _Lease] = field(default_factory=dict)
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _offered_since: dict[str, float] = field(default_factory=dict)
    _generation: int = 0
    _wanted: dict[str, _Wanted] = field(default_factory=dict)
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _under_way: set[asyncio.Task[Any]] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def set_offers(self, export: str, wanted: Iterable[Offer], *, revoked: Iterable[str] = ()) -> None:
        """Say all attempts of an export that shall run now; what was wanted before and is not any more is withdrawn.

        Args:
            export: Name of the export.
            wanted: Attempts that shall run, or run already.
            revoked: Keys of running attempts whose workers shall end them and say so.
        """
        await self._whole(self._set_offers(export, {offer.key: offer for offer in wanted}, frozenset(revoked)))

    async def _set_offers(self, export: str, offers: Mapping[str, Offer], revoked: frozenset[str]) -> None:
        async with self._turn(export):
            before = self._wanted.get(export)
            gone = [key for key in (before.offers if before is not None else ()) if key not in offers]
            gone += [key for key in self._held if key not in offers and key.partition(":")[0] == export]
            for key in gone:
                self._withdraw(key)
                self._held.pop(key, None)
            done = before.done & offers.keys() if before is not None else set[str]()
            for key in offers.keys() & self._held.keys():
                self._held[key].offer, self._held[key].revoked = offers[key], key in revoked
            new = [key for key in offers if not self._is_known(key) and key not in done]
            self._wanted[export] = _Wanted(offers, done)
            if new or before is None or not before.done.issuperset(gone):
                rows, told = await self.journal.do(
                    lambda: self.ledger.settle(export, offers, new=new, revoked=revoked), later=True
                )
                for message in told:
                    self.deliver(message)
                self._add(new, rows, offers, revoked=revoked)
            if not offers:
                del self._wanted[export]
        if new or revoked:
            await self._wake()

    def _add(
        self,
        new: Iterable[str],
        rows: Mapping[str, LeaseRow],
        offers: Mapping[str, Offer],
        *,
        revoked: frozenset[str],
    ) -> None:
        for key in new:
            row = rows.get(key)
            if self._is_known(key) or (row is not None and row.state is LeaseState.ENDED):
                continue  # taken back meanwhile, or its result is on the way to the workflow
            if row is not None and row.state is LeaseState.HELD:
                expires = self.clock() + self.ttl
                self._held[key] = _Lease(row.worker, row.epoch, expires, offers[key], revoked=key in revoked)
            elif key not in revoked:
                self._offer(offers[key])

    async def synchronize(self, report: WorkerReport, *, wait_seconds: float = 0.0) -> Answer:
        """Renew, adopt, cancel and grant; parks up to ``wait_seconds`` while there is nothing to say."""
        deadline = self.clock() + wait_seconds
        while True:
            seen = self._generation
            answer = await self._whole(self._synchronize(report))
            remaining = deadline - self.clock()
            if answer.granted or answer.cancel or remaining <= 0:
                return answer
            try:
                async with asyncio.timeout(remaining), self._changed:
                    await self._changed.wait_for(lambda: self._generation != seen)  # noqa: B023 - waited for here
            except TimeoutError:
                deadline = self.clock()

    async def _synchronize(self, report: WorkerReport) -> Answer:
        async with self._turn(f"worker {report.worker}"):
            self._workers[report.worker] = _Worker(report.abilities, self.clock(), report.draining)
            cancel = [held.task for held in report.running if not await self._renew(report.worker, held)]
            granted = self._unknown_to(report)
            free = 0 if report.draining else report.free_slots - len(granted)
            busy = len(report.running) + len(granted)
            chosen: list[Offer] = []
            while free > 0 and not self._has_exclusive(report.worker):
                offer = self._offers.first(report.worker, self._ready(), running=self._running_by_project())
                if offer is None or (offer.exclusive and busy):
                    break  # an exclusive one waits for the worker to become idle, or it would wait for ever
                chosen.append(offer)
                self._offers.remove(offer.key)
                self._held[offer.key] = _Lease(report.worker, 0, self.clock() + self.ttl, offer)
                free, busy = free - 1, busy + 1
            if chosen:
                granted += await self._grant(chosen, report)
            return Answer(granted=tuple(granted), cancel=tuple(cancel))

    async def _renew(self, worker: str, held: Held) -> bool:
        """Renew or adopt a lease; False when the worker shall end the task."""
        lease = self._held.get(held.task)
        if lease is not None:
            if lease.worker != worker or lease.epoch != held.epoch:
                return False
            lease.expires = self.clock() + self.ttl
            return not lease.revoked
        return await self._adopt(worker, held)

    async def _adopt(self, worker: str, held: Held) -> bool:
        async with self._turn(held.export):
            offer = self._withdraw(held.task)  # nobody is given it meanwhile
            adopted = False
            try:
                adopted, told = await self.journal.do(lambda: self.ledger.adopt(worker, held, offer))
            finally:
                if not adopted and offer is not None:
                    self._offer(offer)
            if not adopted:
                return False
            self.deliver(told)
            self._held[held.task] = _Lease(worker, held.epoch, self.clock() + self.ttl, self._wanted_offer(held.task))
            log.info(f"adopted {held.task} from worker {worker}")
            return True

    def _unknown_to(self, report: WorkerReport) -> list[Granted]:
        """Leases of this worker that it does not report: the answer that granted them was lost, so they are given again."""
        if report.draining:
            return []
        reported = {held.task for held in report.running}
        again: list[Granted] = []
        for key, lease in self._held.items():
            if lease.worker != report.worker or key in reported or not lease.epoch:
                continue
            if lease.offer is not None and not lease.revoked:
                lease.expires = self.clock() + self.ttl
                again.append(Granted(lease.offer, lease.epoch, memory_limit(lease.offer, report)))
        return again[: max(report.free_slots, 0)]

    async def _grant(self, offers: Sequence[Offer], report: WorkerReport) -> list[Granted]:
        pending = [self._held[offer.key] for offer in offers]
        try:
            epochs, told = await self.journal.do(lambda: self.ledger.grant(offers, report.worker))
        except BaseException:
            for offer, lease in zip(offers, pending, strict=True):
                if self._let_go(offer.key, lease) and self._wanted_offer(offer.key) is not None:
                    self._offer(offer)
            raise
        for message in told:
            self.deliver(message)
        granted = []
        for offer, lease, epoch in zip(offers, pending, epochs, strict=True):
            since = self._offered_since.pop(offer.key, self.clock())
            if epoch is None:
                self._let_go(offer.key, lease)
            elif self._held.get(offer.key) is lease:  # or it is not wanted any more
                lease.epoch, lease.expires = epoch, self.clock() + self.ttl
                metrics.LEASES_GRANTED.add(stage=offer.stage)
                metrics.QUEUE_SECONDS.observe(self.clock() - since, stage=offer.stage)
                with within(offer.traceparent):
                    log.info(f"leased {offer.key} (epoch {epoch}) to worker {report.worker}")
                granted.append(Granted(offer, epoch, memory_limit(offer, report)))
        return granted

    async def complete(self, worker: str, held: Held, event: Event) -> None:
        """Take a result in: durable when this returns, and safe to repeat.

        Args:
            worker: Who hands it in.
            held: Which lease it is for.
            event: SUCCEEDED, FAILED or CANCELLED.

        Raises:
            ServiceError: reason ``LEASE_LOST``.
        """
        await self._whole(self._complete(worker, held, event))

    async def _complete(self, worker: str, held: Held, event: Event) -> None:
        ended = event.kind is not EventKind.CANCELLED
        async with self._turn(held.export):
            accepted, told = await self.journal.do(lambda: self.ledger.complete(worker, held, event))
            if not accepted:
                metrics.LEASES_REFUSED.add()
                raise ServiceError(
                    f"{held.task} was given to another worker since, or is not wanted any more",
                    reason="LEASE_LOST",
                    remedy="drop the result",
                    about={"task": held.task, "lease_epoch": held.epoch},
                )
            lease = self._held.get(held.task)
            if lease is not None and lease.epoch == held.epoch:
                del self._held[held.task]
            if ended:
                self._withdraw(held.task)
                if held.export in self._wanted:
                    self._wanted[held.export].done.add(held.task)
            self.deliver(told)
        if lease is None or lease.offer is None or lease.offer.exclusive:
            await self._wake()

    async def expire(self) -> None:
        """Take back leases whose workers were silent for too long, and let go on what was postponed; called about once a second."""
        now = self.clock()
        self._offers.release(now=time.time())
        late = [(key, lease) for key, lease in self._held.items() if lease.epoch and lease.expires < now]
        try:
            await self._whole(self._take_back(late))
        finally:
            for worker in [name for name, known in self._workers.items() if known.seen + 2 * self.ttl < now]:
                del self._workers[worker]
        await self._wake()

    async def _take_back(self, late: Sequence[tuple[str, _Lease]]) -> None:
        for key, lease in late:
            if not self._let_go(key, lease):
                continue
            held, offer = Held(key, lease.epoch), lease.offer
            try:
                taken, told = await self.journal.do(
                    lambda: self.ledger.expire(lease.worker, held, offer, revoked=lease.revoked)  # noqa: B023 - waited for here
                )
            except ServiceError:
                self._held.setdefault(key, lease)  # it is tried again
                raise
            if not taken:
                continue  # its result came in meanwhile
            self.deliver(told)
            with within(offer.traceparent if offer is not None else ""):
                log.warning(f"worker {lease.worker} is silent: {key} is taken back")
            if offer is None:
                continue
            metrics.LEASES_EXPIRED.add(stage=offer.stage)
            if not lease.revoked and self._wanted_offer(key) is not None and not self._is_known(key):
                self._offer(offer)

    def is_of_another(self, worker: str, task: str) -> bool:
        """Whether a task is known to be another worker's; right after a restart, nothing is known."""
        lease = self._held.get(task)
        return lease is not None and lease.worker != worker

    def load(self) -> Load:
        """What waits, runs and serves now; may be called from any thread."""
        now = self.clock()
        since = dict(self._offered_since)
        return Load(
            waiting=tuple(
                (offer.stage, max(now - since.get(key, now), 0.0)) for key, offer in list(self._offers.items())
            ),
            leased=tuple(lease.offer.stage for lease in list(self._held.values()) if lease.offer is not None),
            served=tuple(stage for worker in list(self._workers.values()) for stage in worker.abilities.stages),
        )

    def demand(self, stage: str, *, gpu_architecture: str = "") -> int:
        """Attempts of a stage that wait or run: how many workers it could use at this moment.

        Args:
            stage: Name of the stage.
            gpu_architecture: Counts, of those that wait, only the ones that workers with such a GPU can take, and of those that
                run, the ones on such workers and on workers that did not report yet after a restart. ``none`` stands for
                workers without a GPU.
        """
        waiting = sum(
            offer.stage == stage and offer.requirements.possible_on(gpu_architecture) for offer in self._offers.values()
        )
        owners = [
            lease.worker for lease in self._held.values() if lease.offer is not None and lease.offer.stage == stage
        ]
        workers = {owner: self._workers[owner].abilities for owner in owners if owner in self._workers}
        known = {owner: worker.gpu_architecture or NO_GPU for owner, worker in workers.items()}
        return waiting + sum(
            not gpu_architecture or known.get(owner, gpu_architecture) == gpu_architecture for owner in owners
        )

    def unserved(self, *, longer_than: float) -> list[Offer]:
        """Offers that wait for longer than this many seconds while no known worker can take them."""
        now = self.clock()
        late = [offer for key, offer in self._offers.items() if self._offered_since[key] + longer_than < now]
        taken = {
            call: any(call.can(one.abilities) for one in self._workers.values()) for call in {o.call for o in late}
        }
        return [offer for offer in late if not taken[offer.call]]

    def lacking(self, offer: Offer) -> str:
        """What is missing where no known worker can take an offer."""
        return offer.call.lacking(worker.abilities for worker in self._workers.values())

    def _ready(self) -> dict[str, Abilities]:
        return {name: worker.abilities for name, worker in self._workers.items() if not worker.draining}

    def _running_by_project(self) -> Counter[str]:
        return Counter(lease.offer.project for lease in self._held.values() if lease.offer is not None)

    def _has_exclusive(self, worker: str) -> bool:
        return any(
            lease.offer is not None and lease.offer.exclusive for lease in self._held.values() if lease.worker == worker
        )

    def _offer(self, offer: Offer) -> None:
        self._offers.add(offer, now=time.time())
        self._offered_since[offer.key] = self.clock()

    def _is_known(self, key: str) -> bool:
        return key in self._held or key in self._offers

    def _wanted_offer(self, key: str) -> Offer | None:
        wanted = self._wanted.get(key.partition(":")[0])
        return None if wanted is None else wanted.offers.get(key)

    def _let_go(self, key: str, lease: _Lease) -> bool:
        """Forget a lease if it is still the one of its attempt."""
        if self._held.get(key) is not lease:
            return False
        del self._held[key]
        return True

    def _withdraw(self, key: str) -> Offer | None:
        self._offered_since.pop(key, None)
        return self._offers.remove(key)

    async def _wake(self) -> None:
        self._generation += 1
        async with self._changed:
            self._changed.notify_all()

    def _turn(self, name: str) -> asyncio.Lock:
        """What is done in turns for one worker, or for one export."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def _whole(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Carry something out to its end, even if who asked for it goes away meanwhile."""
        task = asyncio.create_task(coroutine)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)
