"""The exports of a coordinator, as one caller of it sees them."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc

from slipway.artifacts import Artifacts, ManifestFile
from slipway.client.artifacts import ProjectArtifacts
from slipway.client.calls import BlockingCalls, create_request, export_name, list_request
from slipway.configuration import ExportConfiguration
from slipway.console.exports import CANCEL, CONTINUE, FORGET, Entry, Listing, Machines, Planned, Shown, shown_message
from slipway.console.wish import Wish
from slipway.errors import ConfigurationError, ModelExportError, ServiceError
from slipway.export_sources.naming import source_settings
from slipway.progress.tracking import ExportProgress, Tracked
from slipway.rpc.values import ENDED_STATES
from slipway.sources.addresses import is_url
from slipway_protos.v1 import export_pb2 as pb

_PAGE = 50
_DIGEST = "sha256:"
_MOST_FOLLOWED = 64
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


@dataclass
class _Followed:
    """An export whose events are read while somebody looks at it.

    Attributes:
        tracked: How far it is.
        looked: When somebody has looked, in seconds of a steady clock.
    """

    tracked: Tracked = field(default_factory=Tracked)
    looked: float = field(default_factory=time.monotonic)


class Following:
    """Follows exports that somebody looks at, and stops soon after nobody does. A caller's right to see an export is checked before."""

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}
        self._lock = threading.Lock()

    def progress(self, message: pb.Export, watch: Callable[[str], Iterator[pb.ExportEvent]]) -> ExportProgress:
        """Return how far an export is.

        Args:
            message: Its record now.
            watch: Yields its events.
        """
        with self._lock:
            followed = self._followed.get(message.name)
            if followed is None and len(self._followed) < _MOST_FOLLOWED:
                followed = self._followed[message.name] = _Followed()
                arguments = (message.name, followed, watch)
                threading.Thread(target=self._follow, args=arguments, name="slipway-follow", daemon=True).start()
        tracked = followed.tracked if followed is not None else Tracked()
        if followed is not None:
            followed.looked = time.monotonic()
        tracked.event(pb.ExportEvent(export=message))
        return tracked.progress()

    def _follow(self, name: str, followed: _Followed, watch: Callable[[str], Iterator[pb.ExportEvent]]) -> None:
        try:
            with contextlib.suppress(ModelExportError), contextlib.closing(watch(name)) as events:  # type: ignore[type-var]  # generators
                for event in events:
                    followed.tracked.event(event)
                    if time.monotonic() - followed.looked > _UNWATCHED_SECONDS:
                        return
        finally:
            with self._lock:
                self._followed.pop(name, None)


class CoordinatorExports:
    """The exports of a coordinator.

    Args:
        calls: The caller's connection.
        project: Project of new exports; the list shows all that the caller may see.
        address: Name of the coordinator, for people; empty for the one that serves the page.
        following: Follows exports for several callers.
    """

    is_here = False
    questions = None

    def __init__(
        self, calls: BlockingCalls, *, project: str, address: str = "", following: Following | None = None
    ) -> None:
        self._calls, self._project, self._address = calls, project, address
        self._following = following or Following()

    @property
    def place(self) -> str:
        """Name of the coordinator."""
        return self._address or "coordinator"

    @property
    def options(self) -> Sequence[str]:
        """Words of a command line for the same place."""
        return ["--coordinator", self._address or "HOST:PORT", "--project", self._project]

    def listed(self, cursor: str) -> Listing:
        """Return a page of the list, newest first."""
        request = list_request("-", page_size=_PAGE, filter="", summary=True)
        request.page_token = cursor
        response = self._calls.call(self._calls.exports.ListExports, request)
        return Listing(tuple(Entry.of(export) for export in response.exports), response.next_page_token)

    def shown(self, project: str, export: str) -> Shown:
        """Return one export."""
        message = self._calls.call(
            self._calls.exports.GetExport, pb.GetExportRequest(name=export_name(export, project=project))
        )
        shown = shown_message(message)
        if message.state in ENDED_STATES:
            return shown
        return replace(shown, progress=self._following.progress(message, self._watch))

    def planned(self, wish: Wish) -> Planned:
        """Return what an export would do, as far as the coordinator can tell before its sources are read."""
        message = self._create(wish, validate_only=True)
        outputs = {task.format: 0 for task in message.tasks if task.format and task.format != "validation"}
        return Planned("", outputs, warnings=tuple(message.warnings))

    def start(self, wish: Wish) -> tuple[str, str]:
        """Create an export; return its project and id."""
        _, project, _, export = self._create(wish, validate_only=False).name.split("/")
        return project, export

    def act(self, project: str, export: str, action: str) -> None:
        """Cancel, retry or delete an export.

        Raises:
            ServiceError: ``REQUEST_INVALID`` for another action.
        """
        name = export_name(export, project=project)
        if action == CANCEL:
            self._calls.call(self._calls.exports.CancelExport, pb.CancelExportRequest(name=name))
        elif action == CONTINUE:
            self._calls.call(self._calls.exports.RetryExport, pb.RetryExportRequest(name=name))
        elif action == FORGET:
            self._calls.call(self._calls.exports.DeleteExport, pb.DeleteExportRequest(name=name))
        else:
            raise ServiceError("nothing of this name can be done", reason="REQUEST_INVALID", remedy="use the buttons")

    @contextlib.contextmanager
    def artifacts(self, project: str) -> Iterator[Artifacts]:
        """Yield the artifacts of a project."""
        yield ProjectArtifacts(self._calls, project)

    def content(self, project: str, artifact: str, file: ManifestFile, *, offset: int = 0) -> Iterator[bytes]:
        """Yield the content of a file of an artifact."""
        return ProjectArtifacts(self._calls, project).read(file, artifact, offset=offset)

    def machines(self) -> Machines:
        """Return the workers, and what waits for them."""
        return Machines(())

    def _create(self, wish: Wish, *, validate_only: bool) -> pb.Export:
        configuration = load(wish)
        sources = digests_of(configuration)
        request = create_request(
            configuration,
            sources=sources,
            labels=_labels(sources),
            export_id="",
            project=wish.project or self._project,
            validate_only=validate_only,
            request_id="" if validate_only else uuid.uuid4().hex,
            priority=0,
            source_formats=None,
        )
        return self._calls.call(self._calls.exports.CreateExport, request)

    def _watch(self, name: str) -> Iterator[pb.ExportEvent]:
        calls = self._calls
        with calls.calling():
            events = calls.exports.WatchExport(pb.WatchExportRequest(name=name), metadata=calls.metadata())
        try:
            yield from events
        except grpc.RpcError as error:
            raise calls.failure(error).error() from error
        finally:
            events.cancel()


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
