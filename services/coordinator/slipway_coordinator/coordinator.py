"""The coordinator as one object: its database, workflows, broker and events, started and stopped together."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from slipway.errors import Failure, ServiceError
from slipway.formats.tasks import PlannedTask
from slipway.planning.precedents import Precedent
from slipway.planning.references import AttemptKey
from slipway.security.access.projects import ALIKE, CurrentProjects
from slipway.sources.addresses import NOWHERE, Allowed
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.lifecycle import transitions
from slipway_coordinator.lifecycle.offers import Offer, offer_of
from slipway_coordinator.lifecycle.quotas import Unended
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskRecord, TaskState
from slipway_coordinator.lifecycle.recovery import lesson
from slipway_coordinator.lifecycle.rules import RuleTable, default_rules
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import State
from slipway_coordinator.storage.deliveries import Announcer
from slipway_coordinator.storage.events import Hub
from slipway_coordinator.storage.inbox import Inbox, InboxEvent
from slipway_coordinator.storage.journal import Journal, retry_until_available, shield, translate_database_errors
from slipway_coordinator.storage.leases import Ledger
from slipway_coordinator.storage.precedents import Precedents
from slipway_coordinator.transfers import TransferLimits
from slipway_coordinator.workflow import engine, periodic, workflow
from slipway_coordinator.workflow.admission import Admission
from slipway_coordinator.workflow.feed import Feed
from slipway_coordinator.workflow.metering import Meter, ReadManifest
from slipway_coordinator.workflow.observation import log_failures, observe
from slipway_coordinator.workflow.periodic import Unserved
from slipway_coordinator.workflow.runs import Runs
from slipway_coordinator.workflow.workflow import Transition

log = logging.getLogger("slipway.coordinator")

T = TypeVar("T")

_READERS = 4


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Settings of a coordinator.

    Attributes:
        state: Address of the database; the caller holds its lock.
        lease_seconds: How long a worker may be silent before its task is given to another.
        workers_gone: No worker of an earlier process can be alive, so their leases end at once (embedded mode).
        no_worker_seconds: Fail a task when no worker can run it for this long; None waits, and warns once.
        max_unended: Exports that may be under way; more are refused.
        upload_bytes: The largest file that a client may upload.
        open_uploads: Files that clients of one project may upload at a time.
        import_from: Addresses of sources that clients may name for workers to import.
        transfers: Limits of the content that passes through.
        download_endpoint: Where clients reach the S3 service of the store; empty lets all content pass through.
        retain_days: How long ended exports are kept; None keeps them for ever.
        rules: Recovery rules; the built-in ones by default.
    """

    state: State
    lease_seconds: float = 30.0
    workers_gone: bool = False
    no_worker_seconds: float | None = None
    max_unended: int = 10_000
    upload_bytes: int = 128 << 30
    open_uploads: int = 64
    import_from: Allowed = NOWHERE
    transfers: TransferLimits = field(default_factory=TransferLimits)
    download_endpoint: str = ""
    retain_days: float | None = None
    rules: RuleTable = field(default_factory=default_rules)


class Coordinator:
    """Runs exports. Start and stop it on the same event loop; only one may run in a process.

    Args:
        options: How it runs.
        precedents: What worked before.
        manifests: Reads the manifests of artifacts, whose bytes then count; None counts none.
        projects: Returns the weights and quotas of projects.
        announcer: Makes the deliveries to receivers of webhooks; None if there are none.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        precedents: Precedents | None = None,
        manifests: ReadManifest | None = None,
        projects: CurrentProjects = lambda: ALIKE,
        announcer: Announcer | None = None,
    ) -> None:
        self.options, self.projects = options, projects
        self._precedents = precedents or Precedents(None)
        self.rules, self.alone = options.rules, options.workers_gone
        self._executor = ThreadPoolExecutor(_READERS, thread_name_prefix="slipway-state")
        self.database = database = Database(options.state.url, announcer=announcer)
        self.feed = Feed(database.changes, self.call)
        self.journal = journal = Journal(database.transactions, on_commit=self._note_commit)
        self.meter = Meter(database, journal, manifests, call=self.call)
        self.hub = Hub(
            reserve=lambda name: journal.commit(lambda: database.reserve_sequences(name)),
            load=self.load,
            on_progress=self.feed.note_progress,
        )
        self._engine_executor = f"coordinator-{uuid.uuid4().hex}"
        self.runs = Runs(self, executor=self._engine_executor, spawn=self._spawn)
        self.inbox, ttl = Inbox(self._read_events, on_first=self.runs.wake), options.lease_seconds
        ledger, deliver = Ledger(database.leases, database.events), self.inbox.deliver
        self.broker = Broker(ledger, journal, deliver=deliver, ttl=ttl, projects=projects, manifests=manifests)
        self.unended = Unended()
        self.admission = Admission(database, self.unended, projects, most=options.max_unended, call=self.call)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._background, self._workflows = set[asyncio.Task[Any]](), set[asyncio.Task[Any]]()

    async def start(self) -> None:
        """Open the state and serve; resume the exports that have not ended meanwhile, however many they are.

        Raises:
            ServiceError: reason ``COORDINATOR_LOCKED`` when this process runs a coordinator already, ``STATE_SCHEMA`` when a newer program
                wrote an export that has not ended.
        """
        workflow.install_surroundings(self)
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self.database.prepare()
        self.runs.unresumed = await self.call(self.database.unended_runs)
        gone, leases = self.options.workers_gone, self.database.leases
        leases.end_outage(lease_seconds=self.options.lease_seconds, workers_gone=gone)
        engine.launch(self.options.state, self._engine_executor)
        self.unended.add(*self.runs.unresumed)
        self._spawn(self.runs.resume_all())
        self._spawn(self._watch_leases())
        self._spawn(self.feed.run())
        self._spawn(self.meter.run())
        if self.options.retain_days is not None:
            self._spawn(periodic.keep_forgetting(self, days=self.options.retain_days))

    async def stop(self) -> None:
        """Stop at once; a later start on the same state resumes from here."""
        workflow.install_surroundings(None)
        tasks = [*self._background, *self._workflows]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # end() waits for the engine's threads; none of them needs this loop any more.
        with ThreadPoolExecutor(1) as once:
            await asyncio.get_running_loop().run_in_executor(once, engine.end)
        self._executor.shutdown()
        self.journal.close()
        self.database.close()

    # Called by the services

    @shield
    async def create(self, record: ExportRecord) -> ExportRecord | None:
        """Store an export and start it; None if this name or request already has one.

        Raises:
            ServiceError: reason ``QUEUE_FULL`` or ``QUOTA_EXCEEDED`` if there is no room for another one.
        """
        async with self.admission.place(record):
            if not await self.journal.commit(lambda: self.database.insert(record)):
                return None
            self.unended.add(record.name)
        self.runs.begin(record)
        return record

    async def load(self, name: str) -> ExportRecord | None:
        """Return the stored export; None if there is none."""
        return await self.call(lambda: self.database.get(name))

    async def cancel(self, record: ExportRecord) -> None:
        """Request that an export ends. One that waits to be resumed is resumed now."""
        # To its end even if the caller leaves, unless the coordinator stops: its name is no longer among those to resume.
        await asyncio.shield(self._spawn(self.runs.resume(record.name)))
        event = Event(kind=EventKind.CANCEL_REQUESTED, time=time.time())
        await self._notify(record.name, event, f"{record.workflow_id}#cancel")

    @shield
    async def retry(self, record: ExportRecord) -> ExportRecord:
        """Run an ended export again.

        Raises:
            ServiceError: reason ``EXPORT_STATE`` if another call changed or deleted it meanwhile; ``QUEUE_FULL`` or
                ``QUOTA_EXCEEDED`` if there is no room for another one.
        """
        again = transitions.restart(record).with_(revision=record.revision + 1)
        async with self._turn(record.name), self.admission.place(record):
            if not await self.journal.commit(lambda: self.database.save(again)):
                raise _changed_error(record)
            self.unended.add(again.name)
        self.runs.begin(again)
        await self.hub.publish(again.name, again)
        return again

    @shield
    async def delete(self, record: ExportRecord) -> None:
        """Forget an ended export; harmless to repeat.

        Raises:
            ServiceError: reason ``EXPORT_STATE`` if another call retried it meanwhile.
        """
        async with self._turn(record.name):
            stored = await self.load(record.name)
            if stored is None:
                return
            if stored.revision != record.revision:
                raise _changed_error(record)
            await self.call(lambda: engine.forget(record))
            await self.journal.commit(lambda: self.database.delete(record.name))
            self.hub.forget(record.name)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking call on the state, outside any workflow's context (where it would become a step).

        Raises:
            ServiceError: reason ``COORDINATOR_UNAVAILABLE`` if the database is unavailable.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, translate_database_errors, function)

    # Called by workflows (see workflow.Surroundings)

    def track_task(self, task: asyncio.Task[Any] | None) -> None:
        """Register the asyncio task that runs a workflow, so that it is stopped with the process."""
        if task is not None:
            self._workflows.add(task)
            task.add_done_callback(self._workflows.discard)

    async def events(self, record: ExportRecord, *, after: int) -> list[InboxEvent]:
        """Wait for and return this run's events after the one numbered ``after``."""
        return await self.inbox.after(record.name, record.run, after)

    async def publish_revision(self, record: ExportRecord, changes: Sequence[Transition]) -> None:
        """Store a new revision, publish it to watchers, and offer its attempts. A replayed revision only writes its spans again."""
        if not changes and self.runs.take_published(record):
            return
        before = changes[0].before if changes else record  # None at the beginning of a run, which was queued
        news = await self.journal.commit(
            lambda: self.database.save(record, before=before, state_before=ExportState.QUEUED), later=True
        )
        # Before the revision is published: a watcher may end this process as soon as it sees the export's end.
        for change in changes:
            observe(change.before, change.after, at=change.at, news=news)
            if news:
                log_failures(change.before, change.after)
                await self._learn(change)
        if record.state.ended:
            self.inbox.close(record.name, record.run)
        if news:
            await self.offer(record)

    async def offer(self, record: ExportRecord) -> None:
        """Offer the attempts of a stored revision, and publish it to watchers."""
        offers = [offer_of(record, task, alone=self.alone) for task in record.tasks if _is_wanted(task)]
        stopping = record.state is ExportState.CANCELLING
        await self._publish(record, offers, revoked=[offer.key for offer in offers] if stopping else ())

    async def find_precedent(self, key: str, task: PlannedTask) -> Precedent | None:
        """Return the precedent stored under a key, for a task."""
        return await self.call(lambda: self._precedents.find(key, task))

    async def stop_on_fault(self, name: str, failure: Failure) -> None:
        """End an export that a fault in the coordinator itself keeps from continuing."""
        record = await retry_until_available(lambda: self.load(name))
        if record is None or record.state.ended:
            return
        stopped = transitions.stop(record, failure, now=time.time()).with_(revision=record.revision + 1)
        await self.journal.commit(lambda: self.database.save(stopped), later=True)
        observe(record, stopped, at=time.time(), news=True)
        self.inbox.close(name, stopped.run)
        await self._publish(stopped, (), revoked=())

    async def _publish(self, record: ExportRecord, offers: Iterable[Offer], *, revoked: Iterable[AttemptKey]) -> None:
        if record.state.ended:
            self.unended.discard(record.name)
        await self.hub.publish(record.name, record)
        await self.broker.set_offers(record.name, offers, revoked=revoked)

    # Inside

    async def _learn(self, change: Transition) -> None:
        """Store the precedents of tasks that have just succeeded."""
        earlier = {task.id: task.state for task in change.before.tasks} if change.before is not None else {}
        for task in change.after.tasks:
            if task.state is not TaskState.SUCCEEDED or earlier.get(task.id) is TaskState.SUCCEEDED:
                continue
            learned = lesson(task, rules=self.rules, warnings=change.after.warnings)
            if learned is not None and task.precedent:
                key = task.precedent
                await self.call(lambda key=key, learned=learned: self._precedents.keep(key, learned))  # type: ignore[misc]

    async def _read_events(self, export: str, run: int, after: int) -> list[InboxEvent]:
        events = self.database.events
        return await retry_until_available(lambda: self.call(lambda: events.read(export, run, after=after)))

    @shield
    async def _notify(self, export: str, event: Event, key: str) -> None:
        self.inbox.deliver(await self.journal.commit(lambda: self.database.events.put(export, event, key)))

    async def _watch_leases(self) -> None:
        unserved = Unserved(self.broker.board, self.hub, self._notify, fail_after=self.options.no_worker_seconds)
        while True:
            await asyncio.sleep(min(1.0, self.options.lease_seconds / 3))
            try:
                await self.broker.expire()
                await unserved.check()
            except ServiceError as error:
                log.warning(f"leases cannot be checked now: {error}")
            except Exception:  # if this loop ended, no lease would ever expire again
                log.exception("checking leases failed")

    def _note_commit(self) -> None:
        self.feed.note_stored()
        self.meter.note_stored()

    def _turn(self, name: str) -> asyncio.Lock:
        """Return the lock that makes client calls on one ended export take turns."""
        return self._turns.setdefault(name, asyncio.Lock())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, context=contextvars.Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _changed_error(record: ExportRecord) -> ServiceError:
    return ServiceError(
        f"{record.name} was changed or deleted meanwhile", reason="EXPORT_STATE", remedy="read the export again"
    )


def _is_wanted(task: TaskRecord) -> bool:
    return task.state in {TaskState.QUEUED, TaskState.RUNNING} and not task.attempt.state.ended
