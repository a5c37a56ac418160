"""The client with plain blocking calls."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Self

import grpc

from slipway.artifacts.files import folder_files, pull
from slipway.artifacts.store import OnBytes
from slipway.client.artifacts import ProjectArtifacts, list_artifacts
from slipway.client.calls import (
    DEFAULT_PROJECT,
    TIMEOUT_SECONDS,
    BlockingCalls,
    ExportsResumption,
    Resumption,
    add_page,
    artifact_name,
    create_request,
    ended_early,
    export_name,
    list_request,
    obstacle_of,
    watch_request,
)
from slipway.configuration import ExportConfiguration
from slipway.errors import Failure
from slipway.files.checksums import without_checksums
from slipway.settings.security import Security
from slipway_protos.v1 import artifact_pb2, coordinator_pb2
from slipway_protos.v1 import export_pb2 as pb


class Client:
    """Calls ``slipway.v1.ExportService``, ``ArtifactService`` and ``CoordinatorService``. Exports may be named by id or in full.

    Safe for several threads.

    Every method raises :class:`~slipway.errors.ModelExportError` with the coordinator's reason, or ``COORDINATOR_UNAVAILABLE`` if it
    does not respond.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        security: Certificates and token; None connects without TLS and token.
        project: Project of artifacts, and of exports that are named by id alone.
        timeout_seconds: Longest time one call may take; watching has no limit.

    Raises:
        ConfigurationError: A file of ``security`` cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        security: Security | None = None,
        project: str = DEFAULT_PROJECT,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.address = address
        self.project = project
        self._calls = BlockingCalls(address, security=security, timeout_seconds=timeout_seconds)

    @classmethod
    def over(cls, calls: BlockingCalls, *, project: str = DEFAULT_PROJECT) -> Self:
        """Return a client of a connection that exists.

        Args:
            calls: The connection.
            project: Project of artifacts, and of exports that are named by id alone.
        """
        client = cls.__new__(cls)
        client.address, client.project, client._calls = calls.address, project, calls
        return client

    def close(self) -> None:
        """Close the connection; calls under way end."""
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create_export(
        self,
        configuration: ExportConfiguration,
        *,
        sources: Mapping[str, str],
        labels: Mapping[str, str] | None = None,
        export_id: str = "",
        project: str = "",
        validate_only: bool = False,
        request_id: str = "",
        priority: int = 0,
        source_formats: Mapping[str, str] | None = None,
    ) -> pb.Export:
        """Create an export; repeating the same request returns the export it made before.

        Args:
            configuration: Settings of the export.
            sources: Digests of the artifacts ``base``, ``adapter`` and optionally ``heldout``, ``test_inputs`` and ``calibration``.
            labels: Labels for people.
            export_id: Last part of the name; chosen by the coordinator if empty.
            project: Owner; the client's project if empty.
            validate_only: Only plan and check.
            request_id: Identifies a repeated request, even without an ``export_id``.
            priority: -100 to 100; of the project's tasks, those of a higher priority go first.
            source_formats: Formats of sources that are not plain safetensors; :func:`slipway.model.base_format.base_format` of the base.
        """
        request = create_request(
            configuration,
            sources=sources,
            labels=labels,
            export_id=export_id,
            project=project or self.project,
            validate_only=validate_only,
            request_id=request_id,
            priority=priority,
            source_formats=source_formats,
        )
        return self._calls.call(self._calls.exports.CreateExport, request)

    def get_export(self, name: str) -> pb.Export:
        """Return one export."""
        return self._calls.call(self._calls.exports.GetExport, pb.GetExportRequest(name=self._name(name)))

    def list_exports(
        self,
        *,
        project: str = "",
        page_size: int = 0,
        filter: str = "",  # noqa: A002 - the field's name everywhere
        summary: bool = False,
    ) -> Iterator[pb.Export]:
        """Yield a project's exports that match the filter, newest first, fetched page by page.

        With ``summary`` they come without configuration, sources and tasks, which is a tenth of the size.
        """
        request = list_request(project or self.project, page_size=page_size, filter=filter, summary=summary)
        while True:
            response = self._calls.call(self._calls.exports.ListExports, request)
            yield from response.exports
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    def cancel_export(self, name: str, *, etag: str = "") -> pb.Export:
        """Cancel an export; with ``etag``, only if it has not changed since."""
        return self._calls.call(
            self._calls.exports.CancelExport, pb.CancelExportRequest(name=self._name(name), etag=etag)
        )

    def retry_export(self, name: str, *, etag: str = "") -> pb.Export:
        """Run an unsuccessful export again."""
        return self._calls.call(
            self._calls.exports.RetryExport, pb.RetryExportRequest(name=self._name(name), etag=etag)
        )

    def delete_export(self, name: str, *, etag: str = "") -> None:
        """Forget an ended export."""
        self._calls.call(self._calls.exports.DeleteExport, pb.DeleteExportRequest(name=self._name(name), etag=etag))

    def watch_export(
        self, name: str, *, after_sequence: int = 0, patience_seconds: float = 120.0
    ) -> Iterator[pb.ExportEvent]:
        """Yield events until the export ends, beginning with its current state.

        Resumes by itself after a disconnect, without repeating an event. Closing the iterator ends the call.

        Args:
            name: Name of the export.
            after_sequence: Number of the last event already seen.
            patience_seconds: How long the coordinator may be unavailable at a time; 0 gives up at once.
        """
        watch = Resumption(after_sequence, patience_seconds=patience_seconds)
        while True:
            for event in self._watch_once(self._name(name), watch):
                if isinstance(event, Failure):
                    time.sleep(watch.pause_seconds(event))
                else:
                    yield event
            if watch.ended:
                return

    def _watch_once(self, name: str, watch: Resumption) -> Iterator[pb.ExportEvent | Failure]:
        """Yield new events over one connection; if it breaks before the export ends, yield the failure last."""
        request = pb.WatchExportRequest(name=name, after_sequence=watch.sequence)
        with self._calls.calling():
            call = self._calls.exports.WatchExport(request, metadata=self._calls.metadata())
        try:
            yield from (event for event in call if watch.is_new(event))
        except grpc.RpcError as error:
            yield self._calls.failure(error)
        else:
            watch.ended = True  # the server closed the stream regularly; a server that stops would cancel it
        finally:
            call.cancel()

    def watch_exports(
        self,
        *,
        project: str = "",
        filter: str = "",  # noqa: A002 - the field's name everywhere
        cursor: str = "",
        include_progress: bool = False,
        patience_seconds: float = 120.0,
    ) -> Generator[pb.ExportsEvent, None, None]:
        """Yield what happens to a project's exports, without end: creations, changes of state, deletions, and bookmarks in silences.

        The first event is a bookmark: exports that are listed after it are all there are, and nothing that happens to them is missed.
        Resumes by itself after a disconnect, with nothing lost or repeated. Closing the iterator ends the call.

        Args:
            project: ``-`` for all projects that the caller may see; the client's project if empty.
            filter: Conditions on the exports, as for :meth:`list_exports`.
            cursor: That of the last event already seen.
            include_progress: Also yield the progress of tasks.
            patience_seconds: How long the coordinator may be unavailable at a time; 0 gives up at once.

        Raises:
            ModelExportError: ``CURSOR_EXPIRED`` if the coordinator no longer has everything since the cursor, or another reason.
        """
        request = watch_request(
            project or self.project, filter=filter, cursor=cursor, include_progress=include_progress
        )
        watch = ExportsResumption(request, patience_seconds=patience_seconds)
        while True:
            for event in self._watch_exports_once(watch):
                if isinstance(event, Failure):
                    time.sleep(watch.pause_seconds(event))
                else:
                    yield event

    def _watch_exports_once(self, watch: ExportsResumption) -> Iterator[pb.ExportsEvent | Failure]:
        """Yield events over one connection, and at the end why it ended."""
        with self._calls.calling():
            call = self._calls.exports.WatchExports(watch.request, metadata=self._calls.metadata())
        try:
            yield from map(watch.note, call)
            yield ended_early()
        except grpc.RpcError as error:
            yield self._calls.failure(error)
        finally:
            call.cancel()

    def list_formats(self, *, page_size: int = 0) -> Iterator[coordinator_pb2.Format]:
        """Yield the formats that the coordinator knows, and whether its workers can make them now."""
        request = coordinator_pb2.ListFormatsRequest(page_size=page_size)
        while True:
            response = self._calls.call(self._calls.coordinator.ListFormats, request)
            yield from response.formats
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    def validation_obstacle(self) -> Failure | None:
        """Return why no live worker can judge outputs, which exports of any format have by default; None if one can."""
        request = coordinator_pb2.ListFormatsRequest(page_size=1)
        return obstacle_of(self._calls.call(self._calls.coordinator.ListFormats, request))

    def list_workers(self, *, page_size: int = 0) -> coordinator_pb2.ListWorkersResponse:
        """Return the workers that are alive and the tasks that wait for one, as far as the caller may see them, all pages together."""
        request = coordinator_pb2.ListWorkersRequest(page_size=page_size)
        response = self._calls.call(self._calls.coordinator.ListWorkers, request)
        while response.next_page_token:
            request.page_token = response.next_page_token
            add_page(response, self._calls.call(self._calls.coordinator.ListWorkers, request))
        return response

    def list_projects(self, *, page_size: int = 0) -> Iterator[coordinator_pb2.Project]:
        """Yield the projects that the caller may see, with their limits and what they use."""
        request = coordinator_pb2.ListProjectsRequest(page_size=page_size)
        while True:
            response = self._calls.call(self._calls.coordinator.ListProjects, request)
            yield from response.projects
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    def push_artifact(
        self, source: str | Path | Mapping[str, Path], *, project: str = "", on_bytes: OnBytes | None = None
    ) -> str:
        """Upload a folder, or files by their path inside the artifact; return the digest, from which an export may start.

        Args:
            source: The files, which are not changed. Content that the project has uploaded before is not sent again.
            project: Owner; the client's project if empty.
            on_bytes: Gets the size of each piece once it is sent; an exception from it ends the transfer.
        """
        if isinstance(source, Mapping):  # a caller who names single files may name them by links
            files = {name: Path(os.path.realpath(path)) for name, path in source.items()}
        else:
            files = without_checksums(folder_files(Path(source)))
        return self._artifacts(project).put_files(files, on_bytes=on_bytes)

    def pull_artifact(
        self, digest: str, folder: str | Path, *, project: str = "", on_bytes: OnBytes | None = None
    ) -> Path:
        """Write an artifact's verified files into a new folder, all or none; return the folder."""
        return pull(self._artifacts(project), digest, Path(folder), on_bytes=on_bytes)

    def get_artifact(self, digest: str, *, project: str = "") -> artifact_pb2.Artifact:
        """Return the files of an artifact."""
        name = artifact_name(digest, project=project or self.project)
        return self._calls.call(self._calls.artifacts.GetArtifact, artifact_pb2.GetArtifactRequest(name=name))

    def list_artifacts(self, *, project: str = "", page_size: int = 0) -> Iterator[str]:
        """Return the digests of a project's artifacts (``-``: of all projects), sorted, fetched page by page."""
        return list_artifacts(self._calls, project or self.project, page_size=page_size)

    def delete_artifact(self, digest: str, *, project: str = "", allow_missing: bool = False) -> list[str]:
        """Give up an artifact that was pushed: it no longer counts for the project. A cleanup removes its content once it is old.

        Args:
            digest: The artifact.
            project: Its project.
            allow_missing: Whether an artifact that the project does not have is no error.

        Returns:
            Names of exports of the project, 10 at most, that still have it, and for which it stays until they are deleted.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``: the project has no such artifact.
        """
        name = artifact_name(digest, project=project or self.project)
        request = artifact_pb2.DeleteArtifactRequest(name=name, allow_missing=allow_missing)
        return list(self._calls.call(self._calls.artifacts.DeleteArtifact, request).exports)

    def _name(self, name: str) -> str:
        return export_name(name, project=self.project)

    def _artifacts(self, project: str) -> ProjectArtifacts:
        return ProjectArtifacts(self._calls, project or self.project)
