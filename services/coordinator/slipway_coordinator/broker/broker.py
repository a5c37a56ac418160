"""Match offers with workers: a :class:`Board` in memory over durable leases.

The workflow states its offers (:meth:`Broker.set_offers`), workers report what they run and how many slots are free
(:meth:`Broker.synchronize`), and the workflow learns of every result as an :class:`Event`. A lease has an epoch that grows
with every grant, so a late result of a former owner is recognised and refused. After a restart the memory is empty: workers
report what they run and their leases are adopted, so no lease is ended in the first ``ttl`` seconds.

The board decides who gets an offer and changes at once. The :class:`Ledger` is authoritative and changes in the same order, a
little later. Calls about one worker, or about one export, take turns; others never wait for each other's transactions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakValueDictionary

from slipway.contracts.engine import is_worker_of
from slipway.errors import Failure, ServiceError
from slipway.observability import metrics
from slipway.observability.telemetry import within
from slipway.planning.references import AttemptKey
from slipway.security.access.projects import ALIKE, CurrentProjects
from slipway_coordinator.broker.board import Board, ExportOffers
from slipway_coordinator.broker.inputs import Inputs, ReadManifest
from slipway_coordinator.broker.workers import Lease
from slipway_coordinator.lifecycle.offers import Answer, Granted, Held, Offer, WorkerReport, memory_limit
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.inbox import InboxEvent
from slipway_coordinator.storage.journal import Journal, shield
from slipway_coordinator.storage.leases import LeaseRow, LeaseState, Ledger

log = logging.getLogger("slipway.coordinator.broker")

_MEASURE_SECONDS, _MEASURE_PAUSE_SECONDS = 1.0, 30.0
_MEASURED_AT_ONCE = 64
"""Waiting attempts that are measured each second if they were offered before any worker reported what it holds."""


@dataclass
class Broker:
    """Offers and leases of one coordinator. All methods run on one event loop.

    Attributes:
        ledger: The durable leases.
        journal: Commits changes of the ledger.
        deliver: Hands stored events to the workflows.
        ttl: Seconds a lease lives without a report.
        clock: Seconds; only differences matter.
        projects: Returns the weights of projects.
        manifests: Reads manifests, to measure inputs; None where that does not matter.
        board: Offers, leases and workers at this moment.
    """

    ledger: Ledger
    journal: Journal
    deliver: Callable[[InboxEvent | None], None]
    ttl: float = 30.0
    clock: Callable[[], float] = time.monotonic
    projects: CurrentProjects = lambda: ALIKE
    manifests: ReadManifest | None = None
    board: Board = field(init=False)
    _inputs: Inputs | None = None
    _unmeasured_until: float = 0.0
    _generation: int = 0
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.board = Board(self.ttl, self.clock, self.projects)
        self._inputs = Inputs(self.board, self.manifests) if self.manifests is not None else None

    @shield
    async def set_offers(self, export: str, wanted: Iterable[Offer], *, revoked: Iterable[AttemptKey] = ()) -> None:
        """Set all attempts of an export that should run now; withdraw its other offers.

        Args:
            export: Name of the export.
            wanted: Attempts that should run, or run already.
            revoked: Keys of running attempts that their workers must end and report.
        """
        offers, revoked = {offer.key: offer for offer in wanted}, frozenset(revoked)
        async with self._turn(export):
            before = self.board.wanted.get(export)
            gone = [key for key in (before.offers if before is not None else ()) if key not in offers]
            gone += [key for key in self.board.held if key not in offers and key.export == export]
            for key in gone:
                self.board.withdraw(key)
                self.board.held.pop(key, None)
            done = before.done & offers.keys() if before is not None else set[AttemptKey]()
            for key in offers.keys() & self.board.held.keys():
                self.board.held[key].offer, self.board.held[key].revoked = offers[key], key in revoked
            new = [key for key in offers if not self.board.is_known(key) and key not in done]
            made_by, holders = (before.made_by, before.holders) if before is not None else ({}, {})
            holders |= {
                key: self.board.held[key].worker for key in offers.keys() & self.board.held.keys()
            }  # adopted before
            self.board.wanted[export] = ExportOffers(offers, revoked, done, made_by, holders)
            await self._measure([offers[key] for key in new])
            if new or before is None or not before.done.issuperset(gone):
                rows, told = await self.journal.commit(
                    lambda: self.ledger.settle(export, offers, new=new, revoked=revoked), later=True
                )
                for message in told:
                    self.deliver(message)
                self._add(new, rows, self.board.wanted[export])
            if not offers:
                del self.board.wanted[export]
        if new or revoked:
            await self._wake()

    async def _measure(self, offers: Iterable[Offer]) -> None:
        """Learn what attempts fetch, if workers report what they hold. A store that does not answer holds nothing up for long."""
        locality = self.board.locality
        if self._inputs is None or not locality.matters or self.clock() < self._unmeasured_until:
            return
        try:
            async with asyncio.timeout(_MEASURE_SECONDS):
                for offer in offers:
                    if not locality.is_measured(offer.key):
                        sizes = self._inputs.by_part(offer.export, await self._inputs.measure(offer))
                        locality.note_sizes(offer.key, sizes, partial=self._inputs.joins(offer.key))
        except TimeoutError:
            self._unmeasured_until = self.clock() + _MEASURE_PAUSE_SECONDS
        except Exception:  # it is a preference only, and must not end an export or keep leases from expiring
            log.exception("inputs of tasks cannot be measured")
            self._unmeasured_until = self.clock() + _MEASURE_PAUSE_SECONDS

    def _add(self, new: Iterable[AttemptKey], rows: Mapping[str, LeaseRow], wanted: ExportOffers) -> None:
        for key in new:
            row = rows.get(key)
            if self.board.is_known(key) or (row is not None and row.state is LeaseState.ENDED):
                continue  # offered again meanwhile, or its result is on its way to the workflow
            if row is not None and row.state is LeaseState.HELD:
                self.board.hold(key, row.worker, epoch=row.epoch, offer=wanted.offers[key])
            elif key not in wanted.revoked:
                self.board.offer(wanted.offers[key])

    async def synchronize(
        self,
        report: WorkerReport,
        *,
        wait_seconds: float = 0.0,
        on_renewed: Callable[[], Awaitable[None]] | None = None,
    ) -> Answer:
        """Renew and adopt a worker's leases, grant new ones and name those to cancel.

        ``on_renewed`` is called once the leases are renewed, before anything is waited for.

        Waits up to ``wait_seconds`` while there is nothing to return. Only the arrival of a call renews leases, because the
        worker may die while its call is parked. A worker that runs something therefore gets a response early enough to call again.
        A call ends once its worker has made another one, which a broken connection may hide from the server.
        """
        deadline = self.clock() + (min(wait_seconds, self.ttl / 3) if report.running else wait_seconds)
        arriving = True
        while True:
            seen = self._generation
            answer = await self._synchronize(report, arriving=arriving)
            if answer is None:
                return Answer()
            if arriving and on_renewed is not None:
                await on_renewed()
            arriving = False
            remaining = deadline - self.clock()
            if answer.granted or answer.cancel or remaining <= 0:
                return answer
            try:
                async with asyncio.timeout(remaining), self._changed:
                    await self._changed.wait_for(lambda: self._generation != seen)  # noqa: B023 - waited for here
            except TimeoutError:
                deadline = self.clock()

    @shield
    async def _synchronize(self, report: WorkerReport, *, arriving: bool) -> Answer | None:
        """Answer a new report or a parked one; return None if the worker has reported again since."""
        async with self._turn(f"worker {report.worker}"):
            board = self.board
            if not arriving and not board.is_latest(report):
                return None
            board.record_report(report)
            for held in report.running if arriving else ():
                await self._renew(report.worker, held)
            cancel = [held.task for held in report.running if not board.should_continue(report.worker, held)]
            if report.only_task is not None and (board.cannot_take(report) or board.refuse(report)):
                return Answer(cancel=(report.only_task,))
            granted = board.unreported_leases(report)
            free = 0 if report.draining else report.free_slots - len(granted)
            chosen = board.choose(report, free=free, busy=len(report.running) + len(granted))
            if chosen:
                granted += await self._grant(chosen, report)
            return Answer(granted=tuple(granted), cancel=tuple(cancel))

    async def _renew(self, worker: str, held: Held) -> None:
        """Renew a lease, or adopt it if the board does not know it, provided it is this worker's."""
        lease = self.board.held.get(held.task)
        if lease is None:
            await self._adopt(worker, held)
        elif lease.worker == worker and lease.epoch == held.epoch:
            lease.expires = self.board.expiry()

    async def _adopt(self, worker: str, held: Held) -> None:
        async with self._turn(held.export):
            offer = self.board.withdraw(held.task)  # so that no other worker gets it meanwhile
            adopted = False
            try:
                adopted, told = await self.journal.commit(lambda: self.ledger.adopt(worker, held, offer))
            finally:
                if not adopted and offer is not None:
                    self.board.offer(offer)
            if not adopted:
                return
            self.deliver(told)
            self.board.withdraw(held.task)  # its lease may have expired just before, which offers it again
            self.board.hold(held.task, worker, epoch=held.epoch, offer=self.board.wanted_offer(held.task))
            log.info(f"adopted {held.task} from worker {worker}")

    async def _grant(self, offers: Sequence[Offer], report: WorkerReport) -> list[Granted]:
        pending = [self.board.held[offer.key] for offer in offers]
        try:
            gpus = report.gpus / max(report.slots, 1)
            epochs, told = await self.journal.commit(lambda: self.ledger.grant(offers, report.worker, gpus=gpus))
        except BaseException:
            for offer, lease in zip(offers, pending, strict=True):
                if self.board.drop_lease(offer.key, lease) and self.board.wanted_offer(offer.key) is not None:
                    self.board.offer(offer)
            raise
        for message in told:
            self.deliver(message)
        granted = []
        for offer, lease, epoch in zip(offers, pending, epochs, strict=True):
            waited = self.board.end_wait(offer.key)
            if epoch is None:
                self.board.drop_lease(offer.key, lease)
            elif self.board.held.get(offer.key) is lease:  # otherwise the export no longer wants it
                lease.epoch, lease.expires = epoch, self.board.expiry()
                metrics.LEASES_GRANTED.add(stage=offer.stage, project=self.projects().label(offer.project))
                metrics.QUEUE_SECONDS.observe(waited, traceparent=offer.traceparent, stage=offer.stage)
                with within(offer.traceparent):
                    log.info(f"leased {offer.key} (epoch {epoch}) to worker {report.worker}")
                granted.append(Granted(offer, epoch, memory_limit(offer, report)))
        return granted

    @shield
    async def complete(self, worker: str, held: Held, event: Event) -> None:
        """Store a result: durable when this returns, and safe to repeat.

        Args:
            worker: The worker that hands it in.
            held: The lease it belongs to.
            event: SUCCEEDED, FAILED or CANCELLED.

        Raises:
            ServiceError: reason ``LEASE_LOST``.
        """
        ended = event.kind is not EventKind.CANCELLED
        async with self._turn(held.export):
            accepted, told = await self.journal.commit(lambda: self.ledger.complete(worker, held, event))
            if not accepted:
                metrics.LEASES_REFUSED.add()
                raise ServiceError(
                    f"{held.task} has been given to another worker, or is not needed any more",
                    reason="LEASE_LOST",
                    remedy="drop the result",
                    about={"task": held.task, "lease_epoch": held.epoch},
                )
            lease = self.board.held.get(held.task)
            if lease is not None and lease.epoch == held.epoch:
                del self.board.held[held.task]
            if ended:
                self.board.withdraw(held.task)
                if held.export in self.board.wanted:
                    self.board.wanted[held.export].done.add(held.task)
                    self.board.wanted[held.export].made_by |= dict.fromkeys(event.outputs.values(), held.task)
            self.board.locality.note_made(worker, event.outputs.values())
            if lease is not None and lease.offer is not None and event.kind is EventKind.SUCCEEDED:
                self.board.note_imported(lease.offer)
            self.deliver(told)
        if lease is None or lease.offer is None or lease.offer.exclusive or lease.offer.addresses:
            await self._wake()

    async def expire(self) -> None:
        """End leases of silent workers, and release offers whose postponement is over. Called about once a second."""
        self.board.waiting.release(now=time.time())
        await self._measure(islice(list(self.board.waiting.values()), _MEASURED_AT_ONCE))
        try:
            await self._take_back(self.board.expired_leases())
        finally:
            self.board.forget_silent()
            if self._inputs is not None:
                self._inputs.forget()
        await self._wake()

    async def _take_back(self, late: Sequence[tuple[AttemptKey, Lease]]) -> None:
        for key, lease in late:
            departed = self.board.is_ending(lease.worker)
            why = "has departed" if departed else "is silent"
            await self._end_lease(key, lease, departed=departed, why=why, expired=True)

    @shield
    async def _end_lease(
        self, key: AttemptKey, lease: Lease, *, departed: bool, why: str, expired: bool = False
    ) -> None:
        # A worker that speaks again meanwhile waits: it would adopt what another one is being granted.
        async with self._turn(key.export):
            renewed = expired and lease.expires >= self.clock()
            if renewed or not self.board.drop_lease(key, lease):
                return
            held, offer = Held(key, lease.epoch), lease.offer
            try:
                taken, told = await self.journal.commit(
                    lambda: self.ledger.expire(lease.worker, held, offer, revoked=lease.revoked, departed=departed)
                )
            except ServiceError:
                self.board.held.setdefault(key, lease)  # the next call tries again
                raise
            if not taken:
                return  # its result arrived meanwhile
            self.deliver(told)
            with within(offer.traceparent if offer is not None else ""):
                log.warning(f"worker {lease.worker} {why}: {key} is taken back")
            if offer is None:
                return
            metrics.LEASES_EXPIRED.add(stage=offer.stage)
            if not lease.revoked and self.board.wanted_offer(key) is not None and not self.board.is_known(key):
                self.board.offer(offer)

    # For engines

    async def end_lost(self, key: AttemptKey, submission_id: str, *, departed: bool, why: str) -> bool:
        """End the lease of a worker that its engine lost, so that the attempt is offered again; return False if it has none.

        Args:
            key: The attempt.
            submission_id: The submission whose worker it was.
            departed: The worker's node was taken away, which is nobody's fault.
            why: For the log, after the worker's name.
        """
        lease = self.board.held.get(key)
        if lease is None or not lease.epoch or not is_worker_of(lease.worker, submission_id):
            return False
        await self._end_lease(key, lease, departed=departed, why=why)
        await self._wake()
        return True

    async def fail(self, key: AttemptKey, submission_id: str, failure: Failure) -> None:
        """Fail an attempt whose submission its engine has lost; harmless if it has ended or another worker has it, or to repeat."""
        lease, offer = self.board.held.get(key), self.board.wanted_offer(key)
        if offer is None:
            return
        event = Event(kind=EventKind.FAILED, time=time.time(), task=offer.task, attempt=offer.attempt, failure=failure)
        if lease is not None and not is_worker_of(lease.worker, submission_id):
            return
        if lease is not None and lease.epoch:
            try:
                await self.complete(lease.worker, Held(key, lease.epoch), event)
            except ServiceError as error:
                if error.reason != "LEASE_LOST":  # otherwise its result arrived meanwhile
                    raise
        else:
            await self._fail_waiting(key, event, stamp=submission_id)

    @shield
    async def _fail_waiting(self, key: AttemptKey, event: Event, *, stamp: str) -> None:
        async with self._turn(key.export):
            offer = self.board.withdraw(key)
            if offer is None:
                return  # leased, or not wanted, since
            try:
                told = await self.journal.commit(lambda: self.ledger.events.put(key.export, event, stamp))
            except BaseException:
                self.board.offer(offer)
                raise
            self.board.wanted[key.export].done.add(key)
            self.deliver(told)

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until offers change or a task ends, at most so many seconds."""
        seen = self._generation
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._generation != seen)

    def holds(self, worker: str, held: Held) -> bool:
        """Return whether a worker is known to hold a lease. Right after a restart nothing is known until leases are adopted."""
        lease = self.board.held.get(held.task)
        return lease is not None and lease.worker == worker and lease.epoch == held.epoch

    async def _wake(self) -> None:
        self._generation += 1
        async with self._changed:
            self._changed.notify_all()

    def _turn(self, name: str) -> asyncio.Lock:
        """Return the lock that makes calls about one worker, or one export, take turns."""
        return self._turns.setdefault(name, asyncio.Lock())
