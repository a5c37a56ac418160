"""The exports of a coordinator, as one caller of it sees them."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import grpc

from slipway.advice.offers import Offer
from slipway.artifacts import Artifacts, Manifest, ManifestFile
from slipway.client import Client
from slipway.client.artifacts import ProjectArtifacts
from slipway.client.calls import DEFAULT_PROJECT, BlockingCalls, export_name, list_request
from slipway.configuration import ExportConfiguration
from slipway.console.place import (
    CANCEL,
    DELETE,
    RETRY,
    Entry,
    Listing,
    Machines,
    Planned,
    Shown,
    Table,
    shown_message,
)
from slipway.console.wish import Wish
from slipway.errors import ConfigurationError, ServiceError
from slipway.export_sources.naming import source_settings
from slipway.planning.references import VALIDATION
from slipway.progress.tracking import ExportProgress, Tracked
from slipway.results.report import figures
from slipway.rpc.values import ENDED_STATES, failure_of_status
from slipway.rpc.workers import describe_worker
from slipway.sources.addresses import is_url
from slipway.texts import counted
from slipway_protos.v1 import coordinator_pb2
from slipway_protos.v1 import export_pb2 as pb

_PAGE = 50
_DIGEST = "sha256:"
_MOST_FOLLOWED, _MOST_MANIFESTS = 64, 1000
_UNWATCHED_SECONDS = 20.0
_NAMING = (
    "base_model.",
    "checkpoint.",
    "combination.",
    "validation.heldout",
    "validation.test_input",
    "optimization.calibration",
)
"""Settings that may name files, which the form has fields for."""


class Events(Protocol):
    """The events of an export as they come, until they are cancelled."""

    def __iter__(self) -> Iterator[pb.ExportEvent]:
        """Yield the events; raise ``grpc.RpcError`` at a failure."""
        ...

    def cancel(self) -> object:
        """End them, from any thread."""
        ...


@dataclass
class _Followed:
    """An export whose events are read while somebody looks at it.

    Attributes:
        events: Its events.
        tracked: How far it is.
        looked: When somebody has looked, in seconds of a steady clock.
        ended: Set at the end of the events.
    """

    events: Events
    tracked: Tracked = field(default_factory=lambda: Tracked(resuming=False))
    looked: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)


class Following:
    """What several callers look at: exports are followed until soon after nobody looks. A caller's right to see an export is checked before."""

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}
        self._manifests: dict[str, dict[str, Manifest]] = {}
        self._lock = threading.Lock()

    def manifests(self, project: str) -> dict[str, Manifest]:
        """Return the manifests of a project's artifacts that somebody has looked at: only digests of exports that a caller may see are asked for."""
        with self._lock:
            if sum(map(len, self._manifests.values())) > _MOST_MANIFESTS:
                self._manifests.clear()
            return self._manifests.setdefault(project, {})

    def progress(self, message: pb.Export, watch: Callable[[str], Events]) -> ExportProgress:
        """Return how far an export is.

        Args:
            message: Its record now.
            watch: Returns its events.
        """
        with self._lock:
            followed = self._followed.get(message.name)
            if followed is None and len(self._followed) < _MOST_FOLLOWED:
                followed = self._followed[message.name] = _Followed(watch(message.name))
                for work in (self._follow, _look_after):
                    threading.Thread(
                        target=work, args=(message.name, followed), name="slipway-follow", daemon=True
                    ).start()
        tracked = Tracked(resuming=False) if followed is None else followed.tracked
        if followed is not None:
            followed.looked = time.monotonic()
        tracked.event(pb.ExportEvent(export=message))
        return tracked.progress()

    def _follow(self, name: str, followed: _Followed) -> None:
        try:
            with contextlib.suppress(grpc.RpcError):
                for event in followed.events:
                    followed.tracked.event(event)
        finally:
            followed.ended.set()
            with self._lock:
                self._followed.pop(name, None)


def _look_after(_: str, followed: _Followed) -> None:
    """End the events when nobody has looked for a while."""
    while not followed.ended.is_set():
        left = followed.looked + _UNWATCHED_SECONDS - time.monotonic()
        if left <= 0:
            followed.events.cancel()
            return
        followed.ended.wait(left)


class CoordinatorPlace:
    """A coordinator as a place of exports.

    Args:
        calls: The caller's connection.
        project: Project of new exports where none is named, empty for the usual one; the list shows all that the caller may see.
        address: Name of the coordinator, for people; empty for the one that serves the page.
        following: Follows exports for several callers.
    """

    is_here = False
    questions = None

    def __init__(
        self, calls: BlockingCalls, *, project: str, address: str = "", following: Following | None = None
    ) -> None:
        self._calls, self.project, self._address = calls, project, address
        self._client = Client.over(calls, project=project or DEFAULT_PROJECT)
        self._following = following or Following()

    @property
    def name(self) -> str:
        """Name of the coordinator."""
        return self._address or "coordinator"

    @property
    def options(self) -> Sequence[str]:
        """Words of a command line for the same place."""
        return ["--coordinator", self._address or "HOST:PORT"]

    def listed(self, cursor: str = "", *, filter: str = "") -> Listing:  # noqa: A002 - as above
        """Return a page of the list, newest first."""
        request = list_request("-", page_size=_PAGE, filter=filter, summary=True)
        request.page_token = cursor
        response = self._calls.call(self._calls.exports.ListExports, request)
        return Listing(tuple(Entry.of(export) for export in response.exports), response.next_page_token)

    def shown(self, project: str, export: str) -> Shown:
        """Return one export."""
        message = self._client.get_export(export_name(export, project=project))
        shown = shown_message(message)
        if message.state in ENDED_STATES:
            return shown
        return replace(shown, progress=self._following.progress(message, self._watch))

    def offered(self, wish: Wish) -> Sequence[Offer]:  # noqa: ARG002 - nothing is known of a model that is elsewhere
        """Return the outputs that the coordinator knows, with what its workers lack."""
        found = []
        for each in self._client.list_formats():
            found.append(Offer(each.name, each.title, "", unfit=_obstacle(each)))
            found += [Offer(each.name, each.title, level.name, unfit=_obstacle(level)) for level in each.levels]
        return tuple(found)

    def planned(self, wish: Wish) -> Planned:
        """Return what an export would do, as far as the coordinator can tell before its sources are read."""
        message = self._create(wish, validate_only=True)
        outputs = {task.format: 0 for task in message.tasks if task.format and task.format != VALIDATION}
        obstacle = self._client.validation_obstacle() if VALIDATION in {task.format for task in message.tasks} else None
        waits = [f"it would wait to be validated: {obstacle}"] if obstacle else []
        return Planned("", outputs, warnings=(*message.warnings, *waits))

    def start(self, wish: Wish) -> tuple[str, str]:
        """Create an export; return its project and id."""
        _, project, _, export = self._create(wish, validate_only=False).name.split("/")
        return project, export

    def act(self, project: str, export: str, action: str) -> None:
        """Cancel, retry or delete an export.

        Raises:
            ServiceError: ``REQUEST_INVALID`` for another action.
        """
        client = self._client
        actions: dict[str, Callable[[str], object]] = {
            CANCEL: client.cancel_export,
            RETRY: client.retry_export,
            DELETE: client.delete_export,
        }
        if action not in actions:
            raise ServiceError("nothing of this name can be done", reason="REQUEST_INVALID", remedy="use the buttons")
        actions[action](export_name(export, project=project))

    @contextlib.contextmanager
    def artifacts(self, project: str) -> Iterator[Artifacts]:
        """Yield the artifacts of a project."""
        yield ProjectArtifacts(self._calls, project, manifests=self._following.manifests(project))

    def content(self, project: str, artifact: str, file: ManifestFile, *, offset: int = 0) -> Iterator[bytes]:
        """Yield the content of a file of an artifact."""
        return ProjectArtifacts(self._calls, project).read(file, artifact, offset=offset)

    def machines(self) -> Machines:
        """Return the workers, and what waits for them."""
        found = self._client.list_workers()
        hidden = found.hidden_workers
        others = f"{counted(hidden, 'worker')} run nothing that you may see." if hidden else ""
        workers = Table(
            "Workers",
            ("Worker", "State", "Tasks", "Stages", "Memory of a task", "Processors", "GPU"),
            tuple(map(_worker_row, found.workers)),
            others or "There is no worker: exports wait until one joins.",
        )
        queue = Table(
            "What waits",
            ("Stage", "Project", "Tasks", "For", "Because"),
            tuple(map(_queue_row, found.queue)),
            "Nothing waits for a worker.",
        )
        return Machines((workers, queue))

    def _create(self, wish: Wish, *, validate_only: bool) -> pb.Export:
        configuration = load(wish)
        sources = digests_of(configuration)
        return self._client.create_export(
            configuration,
            sources=sources,
            labels=_labels(sources),
            project=wish.project,
            validate_only=validate_only,
            request_id="" if validate_only else wish.request_id or uuid.uuid4().hex,
        )

    def _watch(self, name: str) -> Events:
        calls = self._calls
        with calls.calling():
            return calls.exports.WatchExport(pb.WatchExportRequest(name=name), metadata=calls.metadata())


def _obstacle(part: coordinator_pb2.Format | coordinator_pb2.FormatLevel) -> str:
    return str(failure_of_status(part.obstacle)) if part.HasField("obstacle") else ""


def _worker_row(worker: coordinator_pb2.Worker) -> tuple[str, ...]:
    described = describe_worker(worker)
    return described._replace(
        task_memory=described.task_memory or "–", processors=described.processors or "–", gpu=described.gpu or "none"
    )


def _queue_row(waiting: coordinator_pb2.WaitingTasks) -> tuple[str, ...]:
    age = figures.duration(waiting.oldest_age_seconds) if waiting.project else "–"
    return waiting.stage, waiting.project or "of others", str(waiting.count), age, waiting.detail


def load(wish: Wish) -> ExportConfiguration:
    """Return the configuration of a wish that names nothing of the machine which reads it.

    Args:
        wish: The fields; the machine may be a coordinator's, whose files and variables are not the caller's.

    Raises:
        ConfigurationError: All problems at once; ``SOURCE_NOT_ALLOWED``: a source is neither an address nor a digest.
    """
    given = {"the run": wish.run, "the base model": wish.base}
    for assignment in wish.assignments:
        key, _, value = assignment.partition("=")
        if key.strip().startswith(_NAMING):
            given[key.strip()] = value.strip()
    for name, value in given.items():
        _check_source(name, value)
    configuration = wish.load(environment={}).configuration
    for name, value in source_settings(configuration).items():
        _check_source(name, value)
    return configuration


def digests_of(configuration: ExportConfiguration) -> dict[str, str]:
    """Return the sources that are artifacts already, by their names; workers import the others."""
    return {name: value for name, value in source_settings(configuration).items() if value.startswith(_DIGEST)}


def _check_source(name: str, value: str) -> None:
    if value and value != "none" and not value.startswith(_DIGEST) and not is_url(value):
        raise ConfigurationError(
            f"{name} is {value!r}, which is not where a coordinator can read it",
            reason="SOURCE_NOT_ALLOWED",
            remedy="give s3://… or hf://…, or push the folder (slipway push DIR --coordinator HOST:PORT) and give its digest",
        )


def _labels(sources: Mapping[str, str]) -> dict[str, str]:
    """Return names for people: of a model that comes as artifacts, nobody has said any."""
    digest = sources.get("adapter") or sources.get("base", "")
    return {"model_name": f"model-{digest.removeprefix(_DIGEST)[:8]}"} if digest else {}
