"""Run the exports of a batch: one after the other in this process, or all together at a coordinator. A failure does not end it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slipway.artifacts import Artifacts
from slipway.errors import ArtifactError, ModelExportError
from slipway.exporting.batches.planned import BatchPlan, PlannedExport
from slipway.exporting.batches.result import TABLE, BatchEntry, BatchResult, check_table, write_table
from slipway.exporting.interruption import InterruptibleObserver, Interruption
from slipway.exporting.job import ExportJob, Submitted, require_installed, run_export
from slipway.exporting.opening import artifacts_at
from slipway.machine.known_faults import translate_fault
from slipway.progress.observer import Observer
from slipway.progress.tracking import Position
from slipway.results.result import ExportResult
from slipway.settings import Settings
from slipway.sources.folders import StoredFiles
from slipway_protos.v1 import export_pb2 as pb

if TYPE_CHECKING:
    from slipway.client import Client

log = logging.getLogger("slipway.export")

T = TypeVar("T")

OpenObserver = Callable[[Position], AbstractContextManager[Observer]]

_AWAY = "COORDINATOR_UNAVAILABLE"

_MOST_WATCHED = 16
"""Exports of a coordinator that are watched at a time; it allows 64 streams of one address. The others run too."""


@dataclass
class Batch:
    """One run of a batch.

    Attributes:
        plan: What was checked.
        settings: Settings of this machine.
        open_observer: Function that opens the observer of one export.
        bring_sources: As for an export.
        request_id: As for an export; each one has a name that is made of it.
        interruption: Ends the batch from another thread.
    """

    plan: BatchPlan
    settings: Settings
    open_observer: OpenObserver
    bring_sources: bool = False
    request_id: str = ""
    interruption: Interruption = field(default_factory=Interruption)
    _stored: StoredFiles = field(default_factory=StoredFiles)

    def run(self) -> BatchResult:
        """Run every export that is possible, write the table, and return the results.

        Raises:
            StageError: ``CANCELLED``; what has finished is kept, and the same batch continues.
            ConfigurationError: This machine lacks a library for every export.
            ModelExportError: The coordinator or the store cannot be reached.
        """
        require_installed(self.settings)
        outcomes = self._run_at_coordinator() if self.settings.coordinator else self._run_here()
        entries = tuple(
            outcomes.get(number) or BatchEntry(each.subject.name, each.subject.path, None, each.error)
            for number, each in enumerate(self.plan.exports, start=1)
        )
        return self._write(BatchResult(entries, self.plan.left_out))

    def _possible(self) -> list[tuple[Position, PlannedExport]]:
        of = len(self.plan.exports)
        numbered = enumerate(self.plan.exports, start=1)
        return [(Position(each.subject.name, number, of), each) for number, each in numbered if each.error is None]

    def _run_here(self) -> dict[int, BatchEntry]:
        outcomes: dict[int, BatchEntry] = {}
        for position, each in self._possible():
            with self.open_observer(position) as observer:
                if not outcomes:
                    self._name_impossible()
                self.interruption.check()
                outcomes[position.number] = self._run_one(each, observer)
        return outcomes

    def _run_one(self, each: PlannedExport, observer: Observer) -> BatchEntry:
        began, loaded = time.monotonic(), each.loaded
        assert loaded is not None
        outcome = self._attempt(
            lambda: run_export(
                loaded,
                self.settings,
                observer,
                bring_sources=self.bring_sources,
                request_id=self._request(each),
                interruption=self.interruption,
                stored=self._stored,
                destinations_checked=True,
            ),
        )
        return _entry(each, observer, outcome, began)

    def _run_at_coordinator(self) -> dict[int, BatchEntry]:
        """Submit every export, then watch all of them; an interruption cancels those that have not ended."""
        from slipway.client import Client

        settings, possible = self.settings, self._possible()
        with ExitStack() as stack:
            client = stack.enter_context(
                Client(settings.coordinator, security=settings.security, project=settings.project)
            )
            store = stack.enter_context(artifacts_at(settings.coordinator, settings))
            waiting: dict[int, _Waiting] = {}
            outcomes: dict[int, BatchEntry] = {}
            try:
                for position, each in possible:
                    observer = stack.enter_context(self.open_observer(position))
                    if position is possible[0][0]:
                        self._name_impossible()
                    submitted = self._submit(each, observer, client, store)
                    if isinstance(submitted, BatchEntry):
                        outcomes[position.number] = submitted
                    else:
                        waiting[position.number] = submitted
                self._finish(waiting, outcomes, client, store)
            except BaseException:
                self.interruption.request()
                self._cancel(one for number, one in waiting.items() if number not in outcomes)
                raise
        return outcomes

    def _cancel(self, waiting: Iterable[_Waiting]) -> None:
        """Cancel exports at the coordinator; where it is away, the others are not tried."""
        for one in waiting:
            try:
                one.job.cancel(one.submitted.export.name)
            except ModelExportError as error:
                log.warning("%s may go on at the coordinator: %s", one.each.subject.name, error)
                if error.reason == _AWAY:
                    return

    def _submit(
        self, each: PlannedExport, observer: Observer, client: Client, store: Artifacts
    ) -> _Waiting | BatchEntry:
        began, loaded = time.monotonic(), each.loaded
        assert loaded is not None
        self.interruption.check()
        job = ExportJob(
            loaded,
            self.settings,
            InterruptibleObserver(observer, self.interruption),
            bring_sources=self.bring_sources,
            request_id=self._request(each),
            interruption=self.interruption,
            stored=self._stored,
        )
        submitted, error = self._attempt(lambda: job.submit(client, store))
        if submitted is None:
            if error is not None and error.reason == _AWAY:  # for the others too: each would wait as long
                raise error
            return _entry(each, observer, (None, error), began)
        return _Waiting(each, observer, job, submitted, began)

    def _finish(
        self, waiting: dict[int, _Waiting], outcomes: dict[int, BatchEntry], client: Client, store: Artifacts
    ) -> None:
        def finish(one: _Waiting) -> BatchEntry:
            outcome = self._attempt(lambda: one.job.finish(client, store, one.submitted))
            return _entry(one.each, one.observer, outcome, one.began)

        with ThreadPoolExecutor(_MOST_WATCHED, thread_name_prefix="slipway-watch") as pool:
            futures = {pool.submit(finish, one): number for number, one in waiting.items()}
            try:
                for future in as_completed(futures):
                    outcomes[futures[future]] = future.result()
            except BaseException:
                self.interruption.request()  # the others end at once, and the pool with them
                raise

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, ModelExportError | None]:
        """Return what the work returns, or its error; an interruption is raised."""
        try:
            return work(), None
        except Exception as fault:  # noqa: BLE001 - the boundary between exports: none may end the others
            self.interruption.check()
            return None, _typed(fault)

    def _name_impossible(self) -> None:
        """Name the exports that cannot run, before the first one begins; none of them has an observer."""
        for each in self.plan.exports:
            if each.error is not None:
                log.error("%s: [%s] %s", each.subject.name, each.error.reason, each.error)

    def _request(self, each: PlannedExport) -> str:
        """Return the name of the request for one export; empty if none was given."""
        if not self.request_id:
            return ""
        text = f"{self.request_id}\0{each.subject.path}"
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]

    def _write(self, batch: BatchResult) -> BatchResult:
        """Write the table last, where an output was delivered or a table of an earlier run is."""
        loaded = next((each.loaded for each in self.plan.exports if each.loaded is not None), None)
        delivered = any(entry.result and entry.result.output_directory for entry in batch)
        if loaded is None:
            return batch
        folder = Path(loaded.configuration.output.directory)
        if not delivered and not (folder / TABLE).exists():
            return batch
        written = replace(batch, table=str(folder / TABLE))
        try:
            check_table(folder)  # somebody may have put a file there since
            write_table(written, folder)
        except ArtifactError as error:
            return replace(batch, warnings=(f"the table was not written: {error}",))
        except OSError as error:
            return replace(batch, warnings=(f"{folder / TABLE} cannot be written: {error.strerror or error}",))
        return written


@dataclass(frozen=True)
class _Waiting:
    """An export that the coordinator has."""

    each: PlannedExport
    observer: Observer
    job: ExportJob
    submitted: Submitted
    began: float


def _entry(
    each: PlannedExport,
    observer: Observer,
    outcome: tuple[ExportResult | None, ModelExportError | None],
    began: float,
) -> BatchEntry:
    """Return the entry of an export that has ended, and say at once why it failed."""
    result, error = outcome
    entry = BatchEntry(each.subject.name, each.subject.path, result, error, time.monotonic() - began)
    failure = entry.failure()
    if failure is not None:
        observer.log(logging.ERROR, f"{entry.name}: [{failure.reason}] {failure}")
    if error is not None:
        observer.event(pb.ExportEvent(export=pb.Export(state=pb.EXPORT_STATE_FAILED)))
    return entry


def _typed(fault: Exception) -> ModelExportError:
    """Return the typed error of an exception; one that nothing explains is a fault of Slipway, and stays its cause."""
    known = translate_fault(fault)
    if known is None:
        remedy = "export it alone with --debug to see the traceback"
        known = ModelExportError(f"{type(fault).__name__}: {fault}", reason="INTERNAL", remedy=remedy)
    if known is not fault:
        known.__cause__ = fault
    return known
