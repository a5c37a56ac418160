"""The exports of this machine: those that the console runs itself, one after another, and those that commands have left."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from slipway.advice.for_target import subject_of
from slipway.advice.offers import Offer, offers
from slipway.artifacts import Artifacts, ManifestFile
from slipway.artifacts.opening import blobs_of, open_store
from slipway.client.calls import DEFAULT_PROJECT
from slipway.configuration import LoadedConfiguration
from slipway.console.exports import CANCEL, CONTINUE, Entry, Listing, Machines, Planned, Shown, Table, shown_message
from slipway.console.questions import Questions
from slipway.console.wish import Wish
from slipway.embedded.local_exports import LocalExport, local_export, local_exports
from slipway.errors import Failure, ModelExportError, ServiceError
from slipway.exporting.interruption import Interruption
from slipway.exporting.job import run_export
from slipway.exporting.planned import make_plan
from slipway.machine.doctor import examine, format_health, stage_health
from slipway.progress.tracking import Tracked
from slipway.registry import stage_names
from slipway.results.result import ExportResult
from slipway.rpc.messages import configuration_of
from slipway.settings import Settings
from slipway.sizes import format_size
from slipway_protos.v1 import export_pb2 as pb

log = logging.getLogger("slipway.console")

_PAGE = 50
_ENDED = frozenset({"succeeded", "failed", "cancelled"})
_MOST_WAITING = 32
_PATIENCE_SECONDS = 10.0


class _Job(Tracked):
    """An export that this process runs, or will run.

    Attributes:
        id: Its name until it has one of its own.
        export: Last part of its own name; empty before it has one.
        failure: Why there is no result; None if there is one, or while it runs.
        result: Its result; None while it runs.
    """

    def __init__(self, name: str, loaded: LoadedConfiguration, wanted: str) -> None:
        super().__init__()
        self.id = name
        self.loaded, self.wanted = loaded, wanted
        self.created = datetime.now(UTC)
        self.interruption = Interruption()
        self.export = ""
        self.message: pb.Export | None = None
        self.result: ExportResult | None = None
        self.failure: Failure | None = None
        self.is_over = False

    def event(self, event: pb.ExportEvent) -> None:
        """Take an event of the export."""
        if event.WhichOneof("event") == "export":
            self.message, self.export = event.export, event.export.name.rpartition("/")[2]
        super().event(event)

    @property
    def state(self) -> str:
        """Its state; a job that was ended before its export began is failed or cancelled."""
        said = self.progress().state
        if self.is_over and self.failure is not None:
            return "cancelled" if self.failure.reason == "CANCELLED" else "failed"
        if not self.is_over and said in _ENDED:
            return "delivering"
        return said or "starting"

    def entry(self) -> Entry:
        """Return its line in the list."""
        progress = self.progress()
        if self.message is not None:
            return replace(Entry.of(self.message), state=self.state)
        return Entry(DEFAULT_PROJECT, self.id, progress.title or self.wanted, self.state, created=self.created)

    def shown(self) -> Shown:
        """Return all of it."""
        may = frozenset({CONTINUE}) if self.is_over and self.failure else frozenset()
        folder = self.result.output_directory if self.result else ""
        message = self.message
        if message is not None and self.is_over:
            whole = shown_message(message)
            return replace(
                whole, may=may or whole.may & {CONTINUE}, folder=folder, failure=self.failure or whole.failure
            )
        may = may if self.is_over else frozenset({CANCEL})
        return Shown(self.entry(), self.progress(), message, self.failure, may, folder)


def _left_entry(left: LocalExport) -> Entry:
    """Return the line of an export that a command has left."""
    if left.message is None:
        return Entry(DEFAULT_PROJECT, left.id, "", left.state, problem=left.problem)
    return Entry.of(left.message, state=left.state)


def _left_shown(left: LocalExport) -> Shown:
    """Return an export that a command has left; one that nobody runs can be continued."""
    assert left.message is not None
    may = frozenset({CONTINUE}) if left.state in {"interrupted", "failed", "cancelled"} else frozenset()
    return shown_message(left.message, state=left.state, may=may)


class MachineExports:
    """The exports of this machine; those that it runs end with :meth:`close`, and can be continued.

    Args:
        settings: Settings of this machine, without a coordinator.
        environment: Has the ``EXPORT_*`` variables.
    """

    place = "this machine"
    is_here = True
    options: Sequence[str] = ()

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings, self._environment = settings, environment
        self._jobs: dict[str, _Job] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._number = 0
        self.questions = Questions(settings)

    def close(self) -> None:
        """End what runs, within seconds."""
        for job in self._present():
            job.interruption.request()
        self.questions.close()
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def listed(self, cursor: str) -> Listing:
        """Return a page of the list, newest first."""
        jobs = self._present()
        known = {job.export for job in jobs if job.export}
        left = [_left_entry(each) for each in local_exports(self._settings) if each.id not in known]
        entries = sorted((*(job.entry() for job in jobs), *left), key=_age)
        begin = int(cursor) if cursor.isdecimal() and len(cursor) < 9 else 0
        following = str(begin + _PAGE) if len(entries) > begin + _PAGE else ""
        return Listing(tuple(entries[begin : begin + _PAGE]), following)

    def shown(self, project: str, export: str) -> Shown:  # noqa: ARG002 - there is one project
        """Return one export.

        Raises:
            ServiceError: ``EXPORT_NOT_FOUND``, or ``STATE_SCHEMA`` if it cannot be read.
        """
        job = self._job(export)
        return job.shown() if job is not None else _left_shown(local_export(self._settings, export))

    def offered(self, wish: Wish) -> Sequence[Offer]:
        """Return the outputs to choose from, with what this machine lacks, and sizes for the model of a wish if it is here."""
        health = format_health(tuple(stage_health(name) for name in stage_names()))
        return offers(None if wish.is_empty else subject_of(wish.run, wish.base), health=health)

    def planned(self, wish: Wish) -> Planned:
        """Return what an export would do."""
        made = make_plan(wish.load(environment=self._environment), self._settings)
        error, checked = made.error(), made.checked
        sizes = checked.task_bytes or {}
        outputs = {task.format: sizes.get(task.id, 0) for task in made.tasks if task.format in made.formats}
        return Planned(
            title=made.sources.title if made.sources else "",
            outputs=outputs,
            seconds=made.expected_seconds,
            bytes=checked.disk_needed_bytes,
            warnings=made.warnings,
            failure=error.failure() if error else None,
        )

    def start(self, wish: Wish) -> tuple[str, str]:
        """Begin an export once those before it have ended; return its project and id.

        Raises:
            ConfigurationError: All problems of the settings at once.
            ServiceError: ``QUEUE_FULL``: too many wait.
        """
        return self._begin(wish.load(environment=self._environment), wish.run or wish.base)

    def act(self, project: str, export: str, action: str) -> None:
        """Cancel or continue an export.

        Raises:
            ServiceError: ``REQUEST_INVALID`` if that cannot be done now.
        """
        shown = self.shown(project, export)
        job = self._job(export)
        if action not in shown.may:
            raise ServiceError(f"{export} is {shown.entry.state}", reason="REQUEST_INVALID", remedy="look at it again")
        if action == CANCEL and job is not None:
            job.interruption.request()
        elif action == CONTINUE:
            loaded = job.loaded if job is not None else _recorded(shown.message)
            self._begin(loaded, shown.entry.title, again=export)

    @contextlib.contextmanager
    def artifacts(self, project: str) -> Iterator[Artifacts]:  # noqa: ARG002 - one store for all
        """Yield the store."""
        yield open_store(self._settings)

    def content(self, project: str, artifact: str, file: ManifestFile, *, offset: int = 0) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the content of a file of an artifact."""
        return blobs_of(open_store(self._settings)).read(file, artifact, offset=offset)

    def machines(self) -> Machines:
        """Return what this machine is, and what it can make."""
        report = examine(self._settings)
        machine = report.machine
        about = (
            ("Processor", f"{machine.processor}, {machine.cores} cores"),
            (
                "Memory",
                f"{format_size(machine.memory_available_bytes)} of {format_size(machine.memory_bytes)} available",
            ),
            ("GPU", f"{machine.gpu}, {format_size(machine.gpu_memory_bytes)}" if machine.gpu else "none"),
            ("Store", f"{machine.home}, {format_size(machine.home_free_bytes)} free"),
            ("Slipway", machine.slipway),
        )
        formats = tuple((each.name, "yes" if each.available else "no", each.detail) for each in report.formats)
        headings = ("Output", "Can be made", "What is missing")
        return Machines((Table("This machine", (), about), Table("What it can make", headings, formats)))

    def _begin(self, loaded: LoadedConfiguration, wanted: str, *, again: str = "") -> tuple[str, str]:
        with self._lock:
            waiting = sum(not job.is_over for job in self._jobs.values())
            if waiting >= _MOST_WAITING:
                raise ServiceError(
                    f"{waiting} exports wait already", reason="QUEUE_FULL", remedy="begin it when some have ended"
                )
            self._jobs = {key: job for key, job in self._jobs.items() if again not in {job.id, job.export} or not again}
            self._number += 1
            job = _Job(again or f"new-{self._number}", loaded, wanted)
            self._jobs[job.id] = job
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._run, args=(job,), name=f"slipway-{job.id}", daemon=True)
            self._threads.append(thread)
        thread.start()
        return DEFAULT_PROJECT, job.id

    def _run(self, job: _Job) -> None:
        try:
            job.result = run_export(job.loaded, self._settings, job, interruption=job.interruption)
        except ModelExportError as error:
            job.failure = error.failure()
        except Exception:
            log.exception("the export failed")
            job.failure = ServiceError(
                "the export failed", reason="INTERNAL", remedy="see the log of slipway ui"
            ).failure()
        finally:
            job.note("")
            job.is_over = True

    def _present(self) -> list[_Job]:
        with self._lock:
            return list(self._jobs.values())

    def _job(self, name: str) -> _Job | None:
        return next((job for job in self._present() if name in {job.id, job.export}), None)


def _age(entry: Entry) -> float:
    """Return a key by which the newest entries come first, and those of unknown age last."""
    return -entry.created.timestamp() if entry.created else 1.0


def _recorded(message: pb.Export | None) -> LoadedConfiguration:
    assert message is not None
    return LoadedConfiguration(configuration_of(message.configuration), {}, ())
