"""Who runs what: an in-memory view over durable leases.

The workflow says what is wanted (:meth:`Broker.set_offers`), workers say what they run and have room for
(:meth:`Broker.synchronize`), and whatever follows from that is told to the workflow as an :class:`Event`. A lease has an
epoch that grows with every grant, so what a former owner hands in late is recognised and refused. After a restart the
memory is empty; workers present what they run and are adopted, which is why nobody's lease is ended in the first
``ttl`` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from slipway import metrics
from slipway.errors import ServiceError
from slipway.telemetry import within
from slipway_coordinator.database import Database, answering
from slipway_coordinator.graph import Event, EventKind
from slipway_coordinator.leases import LeaseState
from slipway_coordinator.matching import NO_GPU, Abilities
from slipway_coordinator.offers import Answer, Granted, Held, Load, Offer, WorkerReport, memory_limit
from slipway_coordinator.waiting import Waiting

log = logging.getLogger("slipway.coordinator.broker")

T = TypeVar("T")
Notify = Callable[[str, Event, str], Awaitable[None]]
"""``notify(export, event, key)``: tell an export's workflow something, durably, once per key."""


@dataclass
class _Lease:
    worker: str
    epoch: int
    expires: float
    offer: Offer | None
    revoked: bool = False


@dataclass
class _Worker:
    abilities: Abilities
    seen: float
    draining: bool = False


@dataclass
class Broker:
    """Offers and leases of one coordinator. All methods run on one event loop.

    Attributes:
        database: Durable part.
        notify: Where events go.
        ttl: Seconds a lease lives without a report.
        clock: Seconds; only differences matter.
        executor: Runs blocking calls to ``database``; None runs them at once.
    """

    database: Database
    notify: Notify
    ttl: float = 30.0
    clock: Callable[[], float] = time.monotonic
    executor: Executor | None = None
    _offers: Waiting = field(default_factory=Waiting)
    _held: dict[str, _Lease] = field(default_factory=dict)
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _offered_since: dict[str, float] = field(default_factory=dict)
    _generation: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def set_offers(self, export: str, wanted: Iterable[Offer], *, revoked: Iterable[str] = ()) -> None:
        """Say all attempts of an export that shall run now; what was wanted before and is not any more is withdrawn.

        Args:
            export: Name of the export.
            wanted: Attempts that shall run, or run already.
            revoked: Keys of running attempts whose workers shall end them and say so.
        """
        revoked = set(revoked)
        async with self._lock:
            offers = {offer.key: offer for offer in wanted}
            for key in [key for key, offer in self._offers.items() if offer.export == export and key not in offers]:
                self._withdraw(key)
            for key in [key for key in self._held if key.rpartition(":")[0].rpartition(":")[0] == export]:
                if key not in offers:
                    del self._held[key]
            await self._call(lambda: self.database.leases.end(export, keep=offers))
            for key, offer in offers.items():
                await self._want(key, offer, revoked=key in revoked)
        await self._wake()

    async def _want(self, key: str, offer: Offer, *, revoked: bool) -> None:
        if key in self._held:
            self._held[key].offer = offer
            self._held[key].revoked = revoked
            return
        if key in self._offers:
            return
        row = await self._call(lambda: self.database.leases.get(key))
        if row is not None and row.state is LeaseState.ENDED:
            return  # its result is on the way to the workflow
        if row is not None and row.state is LeaseState.HELD:
            self._held[key] = _Lease(row.worker, row.epoch, self.clock() + self.ttl, offer, revoked=revoked)
            return
        if revoked:
            await self._tell(offer, EventKind.CANCELLED, key=f"{key}#revoked")
            return
        if row is not None:
            await self._tell(offer, EventKind.LEASE_LOST, key=f"{key}#{row.epoch}#lost")
        self._offers.add(offer, now=time.time())
        self._offered_since[key] = self.clock()

    async def synchronize(self, report: WorkerReport, *, wait_seconds: float = 0.0) -> Answer:
        """Renew, adopt, cancel and grant; parks up to ``wait_seconds`` while there is nothing to say."""
        deadline = self.clock() + wait_seconds
        while True:
            seen = self._generation
            async with self._lock:
                answer = await self._synchronize(report)
            remaining = deadline - self.clock()
            if answer.granted or answer.cancel or remaining <= 0:
                return answer
            try:
                async with asyncio.timeout(remaining), self._changed:
                    await self._changed.wait_for(lambda: self._generation != seen)  # noqa: B023 - waited for here
            except TimeoutError:
                deadline = self.clock()

    async def _synchronize(self, report: WorkerReport) -> Answer:
        self._workers[report.worker] = _Worker(report.abilities, self.clock(), report.draining)
        cancel = [held.task for held in report.running if not await self._renew(report.worker, held)]
        granted = list(await self._unknown_to(report))
        free = 0 if report.draining else report.free_slots - len(granted)
        busy = len(report.running) + len(granted)
        while free > 0 and not self._has_exclusive(report.worker):
            offer = self._offers.first(report.worker, self._ready(), running=self._running_by_project())
            if offer is None or (offer.exclusive and busy):
                break  # an exclusive one waits for the worker to become idle, or it would wait for ever
            granted.append(await self._grant(offer.key, offer, report))
            free, busy = free - 1, busy + 1
        return Answer(granted=tuple(granted), cancel=tuple(cancel))

    async def _renew(self, worker: str, held: Held) -> bool:
        """Renew or adopt a lease; False when the worker shall end the task."""
        lease = self._held.get(held.task)
        if lease is not None:
            if lease.worker != worker or lease.epoch != held.epoch:
                return False
            lease.expires = self.clock() + self.ttl
            return not lease.revoked
        row = await self._call(lambda: self.database.leases.get(held.task))
        if row is None or row.worker != worker or row.epoch != held.epoch:
            return False
        if row.state not in {LeaseState.HELD, LeaseState.EXPIRED}:
            return False  # handed in or back; this report was on its way meanwhile
        offer = self._withdraw(held.task)
        self._held[held.task] = _Lease(worker, row.epoch, self.clock() + self.ttl, offer)
        log.info(f"adopted {held.task} from worker {worker}")
        if row.state is LeaseState.EXPIRED:
            await self._call(lambda: self.database.leases.set_state(held.task, LeaseState.HELD))
            if offer is not None:
                stamp = f"{held.task}#{row.epoch}#adopted{self.clock()}"
                await self._tell(offer, EventKind.LEASED, key=stamp, worker=worker, epoch=row.epoch)
        return True

    async def _unknown_to(self, report: WorkerReport) -> list[Granted]:
        """Leases of this worker that it does not report: the answer that granted them was lost, so they are given again."""
        if report.draining:
            return []
        reported = {held.task for held in report.running}
        again = []
        for key, lease in self._held.items():
            if lease.worker == report.worker and key not in reported and lease.offer is not None and not lease.revoked:
                lease.expires = self.clock() + self.ttl
                again.append(Granted(lease.offer, lease.epoch, memory_limit(lease.offer, report)))
        return again[: max(report.free_slots, 0)]

    async def _grant(self, key: str, offer: Offer, report: WorkerReport) -> Granted:
        epoch = await self._call(lambda: self.database.leases.grant(key, export=offer.export, worker=report.worker))
        metrics.LEASES_GRANTED.add(stage=offer.stage)
        metrics.QUEUE_SECONDS.observe(self.clock() - self._offered_since.get(key, self.clock()), stage=offer.stage)
        self._withdraw(key)
        self._held[key] = _Lease(report.worker, epoch, self.clock() + self.ttl, offer)
        with within(offer.traceparent):
            log.info(f"leased {key} (epoch {epoch}) to worker {report.worker}")
        await self._tell(offer, EventKind.LEASED, key=f"{key}#{epoch}#leased", worker=report.worker, epoch=epoch)
        return Granted(offer, epoch, memory_limit(offer, report))

    async def complete(self, worker: str, held: Held, event: Event) -> None:
        """Take a result in: durable when this returns, and safe to repeat.

        Args:
            worker: Who hands it in.
            held: Which lease it is for.
            event: SUCCEEDED, FAILED or CANCELLED.

        Raises:
            ServiceError: reason ``LEASE_LOST``.
        """
        async with self._lock:
            row = await self._call(lambda: self.database.leases.get(held.task))
            if row is None or row.epoch != held.epoch or row.worker != worker:
                metrics.LEASES_REFUSED.add()
                raise ServiceError(
                    f"{held.task} was given to another worker since, or is not wanted any more",
                    reason="LEASE_LOST",
                    remedy="drop the result",
                    about={"task": held.task, "lease_epoch": held.epoch},
                )
            if row.state in {LeaseState.HELD, LeaseState.EXPIRED}:
                await self.notify(row.export, event, f"{held.task}#{held.epoch}#completed")
                state = LeaseState.RETURNED if event.kind is EventKind.CANCELLED else LeaseState.ENDED
                await self._call(lambda: self.database.leases.set_state(held.task, state))
            self._held.pop(held.task, None)
            self._withdraw(held.task)
        await self._wake()

    async def expire(self) -> None:
        """Take back leases whose workers were silent for too long, and let go on what was postponed; called about once a second."""
        async with self._lock:
            now = self.clock()
            self._offers.release(now=time.time())
            for key in [key for key, lease in self._held.items() if lease.expires < now]:
                lease = self._held.pop(key)
                with within(lease.offer.traceparent if lease.offer is not None else ""):
                    log.warning(f"worker {lease.worker} is silent: {key} is taken back")
                await self._call(lambda key=key: self.database.leases.set_state(key, LeaseState.EXPIRED))  # type: ignore[misc]
                if lease.offer is None:
                    continue
                metrics.LEASES_EXPIRED.add(stage=lease.offer.stage)
                if lease.revoked:
                    await self._tell(lease.offer, EventKind.CANCELLED, key=f"{key}#revoked")
                    continue
                await self._tell(lease.offer, EventKind.LEASE_LOST, key=f"{key}#{lease.epoch}#lost")
                self._offers.add(lease.offer, now=time.time())
                self._offered_since[key] = now
            for worker in [name for name, known in self._workers.items() if known.seen + 2 * self.ttl < now]:
                del self._workers[worker]
        await self._wake()

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

    def _withdraw(self, key: str) -> Offer | None:
        self._offered_since.pop(key, None)
        return self._offers.remove(key)

    async def _tell(self, offer: Offer, kind: EventKind, *, key: str, worker: str = "", epoch: int = 0) -> None:
        event = Event(kind=kind, time=time.time(), task=offer.task, attempt=offer.attempt, worker=worker, epoch=epoch)
        await self.notify(offer.export, event, key)

    async def _call(self, function: Callable[[], T]) -> T:
        if self.executor is None:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self.executor, answering, function)

    async def _wake(self) -> None:
        self._generation += 1
        async with self._changed:
            self._changed.notify_all()
