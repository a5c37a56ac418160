"""The exports of this machine: those that the console runs itself, one after another, and those that commands have left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from slipway.advice.for_target import subject_of
from slipway.advice.offers import Offer, offers
from slipway.artifacts import Artifacts, ManifestFile
from slipway.artifacts.opening import blobs_of, open_store
from slipway.client.calls import DEFAULT_PROJECT
from slipway.configuration import LoadedConfiguration
from slipway.console.jobs import Job, Jobs
from slipway.console.place import (
    CANCEL,
    DELETE,
    RETRY,
    STATES_AT_END,
    Entry,
    Listing,
    Machines,
    Planned,
    Shown,
    Table,
    shown_message,
)
from slipway.console.questions import Questions
from slipway.console.wish import Wish
from slipway.embedded.local_exports import LocalExport, delete_local_export, local_export, local_exports
from slipway.errors import ModelExportError, ServiceError
from slipway.export_sources.naming import source_settings
from slipway.exporting.interruption import Interruption
from slipway.exporting.job import run_export
from slipway.exporting.planned import make_plan
from slipway.files.paths import is_address
from slipway.machine.doctor import examine, format_health, stage_health
from slipway.progress.observer import Observer
from slipway.registry import stage_names
from slipway.results.delivery import LINEAGE, output_directory
from slipway.results.result import ExportResult
from slipway.rpc.messages import configuration_of
from slipway.settings import Settings
from slipway.sizes import format_size
from slipway.texts import number_of
from slipway_protos.v1 import export_pb2 as pb

_PAGE = 50
_LATER = "its sources are read when the export begins; sizes and checks are known then"


class MachinePlace:
    """This machine as a place of exports; those that it runs end with :meth:`close`, and can be continued.

    Args:
        settings: Settings of this machine, without a coordinator.
        environment: Has the ``EXPORT_*`` variables.
    """

    name = "this machine"
    is_here = True
    options: Sequence[str] = ()
    project = ""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings, self._environment = settings, environment
        self._jobs = Jobs(partial(_run, settings))
        self._planning = threading.Lock()
        self.questions = Questions(settings)

    def close(self) -> None:
        """End what runs, within seconds."""
        self.questions.close()
        self._jobs.close()

    def listed(self, cursor: str = "", *, filter: str = "") -> Listing:  # noqa: A002 - as above
        """Return a page of the list, newest first; a filter is about what is recorded, which exports that begin have not yet."""
        jobs = self._jobs.present()
        known = {name for job in jobs for name in job.names}
        found = local_exports(self._settings, filter=filter)
        matching = {each.id for each in found}
        shown = [job for job in jobs if not filter or job.names & matching]
        left = [_left_entry(each) for each in found if each.id not in known]
        entries = sorted((*map(_job_entry, shown), *left), key=_age)
        begin = number_of(cursor, most=1 << 30) or 0
        following = str(begin + _PAGE) if len(entries) > begin + _PAGE else ""
        return Listing(tuple(entries[begin : begin + _PAGE]), following)

    def shown(self, project: str, export: str) -> Shown:  # noqa: ARG002 - there is one project
        """Return one export.

        Raises:
            ServiceError: ``EXPORT_NOT_FOUND``, or ``STATE_SCHEMA`` if it cannot be read.
        """
        job = self._jobs.find(export)
        return _job_shown(job) if job is not None else _left_shown(local_export(self._settings, export))

    def offered(self, wish: Wish) -> Sequence[Offer]:
        """Return the outputs to choose from, with what this machine lacks, and sizes for the model of a wish if it is here."""
        health = format_health(tuple(stage_health(name) for name in stage_names()))
        return offers(None if wish.is_empty else subject_of(wish.run, wish.base), health=health)

    def planned(self, wish: Wish) -> Planned:
        """Return what an export would do."""
        loaded = wish.load(environment=self._environment)
        if any(
            is_address(each) or each.startswith("sha256:") for each in source_settings(loaded.configuration).values()
        ):
            enabled = loaded.configuration.formats.enabled()  # what is elsewhere may take hours to get here
            return Planned("", {each.name: 0 for each, _ in enabled}, warnings=(*loaded.warnings, _LATER))
        with self._planning:  # one after another: a form asks at every change
            made = make_plan(loaded, self._settings)
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
        """Begin an export once those before it have ended; return its project and name. The same form again begins nothing new.

        Raises:
            ConfigurationError: All problems of the settings at once.
            ServiceError: ``QUEUE_FULL``: too many wait.
        """
        name = f"new-{wish.request_id}" if wish.request_id else ""
        if not name or self._jobs.find(name) is None:
            loaded = wish.load(environment=self._environment)
            name = self._jobs.begin(loaded, wish.run or wish.base, name=name).name
        return DEFAULT_PROJECT, name

    def act(self, project: str, export: str, action: str) -> None:
        """Cancel, retry or delete an export.

        Raises:
            ServiceError: ``EXPORT_STATE`` if that cannot be done now; ``COORDINATOR_LOCKED`` while another process runs it.
        """
        shown = self.shown(project, export)
        if action not in shown.may:
            raise ServiceError(f"{export} is {shown.entry.state}", reason="EXPORT_STATE", remedy="look at it again")
        job = self._jobs.find(export)
        if action == CANCEL and job is not None:
            job.interruption.request()
        elif action == RETRY:
            loaded = job.loaded if job is not None else _recorded(shown.message)
            self._jobs.begin(loaded, shown.entry.title, name=export)
        elif action == DELETE:
            self._jobs.drop(export)
            if shown.message is not None:
                delete_local_export(self._settings, shown.entry.id)

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


def _run(
    settings: Settings, loaded: LoadedConfiguration, observer: Observer, interruption: Interruption
) -> ExportResult:
    return run_export(loaded, settings, observer, interruption=interruption)


def _job_entry(job: Job) -> Entry:
    """Return the line of a job in the list."""
    if job.message is not None:
        return replace(Entry.of(job.message), state=job.state)
    title = job.progress().title or job.wanted
    return Entry(DEFAULT_PROJECT, job.name, title, job.state, created=job.created)


def _job_shown(job: Job) -> Shown:
    """Return a job."""
    if not job.is_over:
        may = frozenset() if job.interruption.requested else frozenset({CANCEL})
        return Shown(_job_entry(job), job.progress(), job.message, may=may)
    may = frozenset({DELETE} if job.state == "succeeded" else {RETRY, DELETE})
    folder = job.result.output_directory if job.result else ""
    if job.message is None:
        return Shown(_job_entry(job), job.progress(), None, job.failure, may)
    shown = shown_message(job.message, state=job.state, may=may)
    return replace(shown, folder=folder, failure=job.failure or shown.failure)


def _left_entry(left: LocalExport) -> Entry:
    """Return the line of an export that a command has left."""
    if left.message is None:
        return Entry(DEFAULT_PROJECT, left.id, "", left.state, problem=left.problem)
    return Entry.of(left.message, state=left.state)


def _left_shown(left: LocalExport) -> Shown:
    """Return an export that a command runs or has left; one that nobody runs can be retried."""
    assert left.message is not None
    may = frozenset[str]()
    if left.state in {*STATES_AT_END, "interrupted"}:
        may = frozenset({DELETE} if left.state == "succeeded" else {RETRY, DELETE})
    return replace(shown_message(left.message, state=left.state, may=may), folder=_folder_of(left.message))


def _folder_of(message: pb.Export) -> str:
    """Return where an export was delivered; empty if it is not there."""
    try:
        folder = output_directory(message, configuration_of(message.configuration).output)
    except ModelExportError:  # of another version
        return ""
    return str(folder) if (folder / LINEAGE).is_file() else ""


def _age(entry: Entry) -> float:
    """Return a key by which the newest entries come first, and those of unknown age last."""
    return -entry.created.timestamp() if entry.created else 1.0


def _recorded(message: pb.Export | None) -> LoadedConfiguration:
    assert message is not None
    return LoadedConfiguration(configuration_of(message.configuration), {}, ())
