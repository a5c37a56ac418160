"""Runs of exports without a workflow: their beginning, their wait for the first event, and what a restart does with them.

A queue of thousands of exports would be as many workflows in memory, each with a whole record, and a restart would replay them all. The
beginning of a run follows from nothing that happened before, and a workflow can start from any stored record (docs/adr/0017). So a run
begins without one, and rests: only its offers are in memory. Its first event starts the workflow, which reads it from the inbox.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from slipway.errors import Failure, ServiceError
from slipway.observability.telemetry import within
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.inbox import Inbox
from slipway_coordinator.storage.journal import Journal, retry_until_available
from slipway_coordinator.workflow import engine, workflow
from slipway_coordinator.workflow.observation import observe

T = TypeVar("T")

log = logging.getLogger("slipway.coordinator")

_BEGINNINGS_AT_ONCE, _STARTS_AT_ONCE = 16, 2
_RESUME_PAUSE_SECONDS = 0.002  # between two exports that are resumed, so that calls are answered meanwhile


class Around(workflow.Surroundings, Protocol):
    """The parts of a coordinator that runs need."""

    database: Database
    journal: Journal
    inbox: Inbox

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking function in a thread."""

    async def load(self, name: str) -> ExportRecord | None:
        """Return the stored export; None if there is none."""

    async def offer(self, record: ExportRecord) -> None:
        """Offer the attempts of a stored revision, and publish it to watchers."""

    async def stop_on_fault(self, name: str, failure: Failure) -> None:
        """End an export that a fault in the coordinator itself keeps from continuing."""


class Runs:
    """The runs of one coordinator that have no workflow now. Used on one event loop.

    Args:
        around: The coordinator.
        executor: Id of this start of the engine.
        spawn: Runs a coroutine in the background.

    Attributes:
        unresumed: The run of each export that an earlier process left and that was not resumed yet, oldest first.
    """

    def __init__(self, around: Around, *, executor: str, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._around, self._executor, self._spawn = around, executor, spawn
        self.unresumed: dict[str, int] = {}
        self._published = set[str]()  # runs that rested, and whose workflow is about to start
        self._beginning, self._starting = asyncio.Semaphore(_BEGINNINGS_AT_ONCE), asyncio.Semaphore(_STARTS_AT_ONCE)

    def begin(self, record: ExportRecord) -> None:
        """Begin a run that was just stored; if this process ends first, the next one does it. Its events are collected from now on."""
        self._around.inbox.open(record.name, record.run)
        self._spawn(self._begin(record))

    def wake(self, export: str, run: int) -> None:
        """Start the workflow of a run that rested, because of its first event."""
        self._spawn(self._wake(export, run))

    def take_published(self, record: ExportRecord) -> bool:
        """Return whether the first revision of a starting workflow is published, as its run has rested with it; say so once."""
        known = record.workflow_id in self._published
        self._published.discard(record.workflow_id)
        return known

    async def resume_all(self) -> None:
        """Resume, one after another, the exports that an earlier process left."""
        while self.unresumed:
            await self.resume(next(iter(self.unresumed)))
            await asyncio.sleep(_RESUME_PAUSE_SECONDS)

    async def resume(self, name: str) -> None:
        """Resume an export that an earlier process left, or end it if that fails. Whoever calls this lets it run to its end."""
        run = self.unresumed.pop(name, 0)
        if not run:
            return
        try:
            await self._resume(name, run)
        except Exception as error:
            log.exception(f"{name} cannot be resumed")
            await self._give_up(name, error)

    async def _resume(self, name: str, run: int) -> None:
        """Continue a run, or end it if its workflow ended without a record."""
        record = await retry_until_available(lambda: self._around.load(name))
        if record is None or record.state.ended or record.run != run:
            return
        begun = await retry_until_available(lambda: self._around.call(lambda: engine.stored_workflow(record)))
        if begun is None:
            await self._continue(record)
        elif begun.ended:
            problem = ServiceError(f"its workflow ended as {begun.state}", reason="INTERNAL", remedy="retry the export")
            await self._around.stop_on_fault(name, problem.failure())
        elif not begun.can_replay:
            self._spawn(self._take_over(record, begun))
        elif begun.is_orphaned(self._executor):
            await retry_until_available(lambda: self._around.call(lambda: engine.resume(record)))

    async def take_over(self, record: ExportRecord, begun: engine.StoredWorkflow) -> None:
        """Continue, at its present revision, an export whose workflow another version began; harmless to repeat.

        Finished tasks stay finished, and running ones continue under their leases: both are in the record, not in the steps. The
        record changes only after the workflow is gone, which a process of its version would replay if this one ended meanwhile.
        """
        log.info(f"{record.name} was begun by {begun.version} and goes on as {engine.WORKFLOW_VERSION}")
        taken, around = record, self._around
        if "events_read" not in record.model_fields_set:  # of a version that does not run on these tables
            taken = record.with_(events_read=begun.events_read(record), revision=record.revision + 1)
            await around.journal.commit(lambda: around.database.save(taken, before=record), later=True)
        await retry_until_available(lambda: around.call(lambda: engine.forget_run(taken)))
        await self._continue(taken)

    async def _take_over(self, record: ExportRecord, begun: engine.StoredWorkflow) -> None:
        try:
            await self.take_over(record, begun)
        except Exception as error:
            log.exception(f"{record.name} cannot be taken over")
            await self._give_up(record.name, error)

    async def _begin(self, record: ExportRecord) -> None:
        async with self._beginning:
            try:
                with within(record.traceparent):
                    now = time.time()
                    begun = await workflow.begin(record, now=now)
                    await self._around.publish_revision(begun, [workflow.Transition(None, begun, now)])
            except Exception as error:
                log.exception(f"{record.name} cannot begin")
                await self._give_up(record.name, error)
                return
        if not begun.state.ended:
            await self._rest(begun)

    async def _continue(self, record: ExportRecord) -> None:
        """Continue a run without a workflow from its stored record: it begins, rests again, or reads what happened while it rested."""
        name, run, around = record.name, record.run, self._around
        around.inbox.open(name, run)  # before the read, so that each event is in one of them
        stored = await retry_until_available(
            lambda: around.call(lambda: around.database.events.read(name, run, after=record.events_read))
        )
        if record.state is ExportState.QUEUED:
            for message in stored:  # a cancellation before the beginning: then the run does not rest
                around.inbox.deliver(message)
            self.begin(record)
            return
        if stored or record.state is not ExportState.RUNNING:
            around.inbox.close(name, run)  # the workflow reads them itself
            self._spawn(self._start(record))
            return
        if not record.events_read:  # the process before may have ended before it sent them
            observe(None, record, at=record.begin_time or record.create_time, news=False)
        await around.offer(record)
        await self._rest(record)

    async def _rest(self, record: ExportRecord) -> None:
        """Let a run rest whose revision is stored and offered, unless something has happened to it meanwhile."""
        if not self._around.inbox.rest(record.name, record.run):
            self._published.add(record.workflow_id)
            await self._start(record)

    async def _wake(self, export: str, run: int) -> None:
        try:
            record = await retry_until_available(lambda: self._around.load(export))
        except Exception as error:
            log.exception(f"{export} cannot be read")
            await self._give_up(export, error)
            return
        if record is not None and not record.state.ended and record.run == run:
            self._published.add(record.workflow_id)
            await self._start(record)

    async def _start(self, record: ExportRecord) -> None:
        """Start the workflow of a stored export; if this process ends first, the next one does it."""
        async with self._starting:
            try:
                await engine.start(record)
            except Exception as error:
                self._published.discard(record.workflow_id)
                log.exception(f"{record.name} cannot be started")
                await self._give_up(record.name, error)

    async def _give_up(self, name: str, error: Exception) -> None:
        """End an export that cannot go on. If its record cannot even be read or stored, the next start tries again."""
        try:
            await self._around.stop_on_fault(name, workflow.fault(error))
        except Exception:  # the caller has other exports, too
            log.exception(f"{name} cannot be ended either")
