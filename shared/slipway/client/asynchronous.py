"""The client for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from slipway.artifacts.store import OnBytes
from slipway.client.blocking import Client
from slipway.client.calls import (
    DEFAULT_PROJECT,
    TIMEOUT_SECONDS,
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
    with_trace,
)
from slipway.configuration import ExportConfiguration
from slipway.errors import Failure, ServiceError
from slipway.rpc.call_ends import failure_of_call
from slipway.rpc.values import sendable
from slipway.security.channels import AsyncChannel
from slipway.settings.security import Security
from slipway_protos.v1 import artifact_pb2, coordinator_pb2
from slipway_protos.v1 import export_pb2 as pb
from slipway_protos.v1.artifact_pb2_grpc import ArtifactServiceStub
from slipway_protos.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from slipway_protos.v1.export_pb2_grpc import ExportServiceStub

T = TypeVar("T")


class AsyncClient:
    """The methods of :class:`~slipway.client.Client` as coroutines and asynchronous iterators.

    Use it on one event loop, as a context manager: ``async with AsyncClient(address) as client: …``.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        security: Certificates and token; None connects without TLS and token.
        project: Project of exports that are named by id alone.
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
        self._timeout = timeout_seconds
        self._security = security
        self._channel = AsyncChannel(address, security)

    async def close(self) -> None:
        """Close the connection; calls under way end."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def create_export(
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
        """Create an export; see :meth:`slipway.client.Client.create_export`."""
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
        return await self._call(self._stub.CreateExport, request)

    async def get_export(self, name: str) -> pb.Export:
        """Return one export."""
        return await self._call(self._stub.GetExport, pb.GetExportRequest(name=self._name(name)))

    async def list_exports(
        self,
        *,
        project: str = "",
        page_size: int = 0,
        filter: str = "",  # noqa: A002 - the field's name everywhere
        summary: bool = False,
    ) -> AsyncIterator[pb.Export]:
        """Yield a project's exports that match the filter, newest first, fetched page by page.

        With ``summary`` they come without configuration, sources and tasks, which is a tenth of the size.
        """
        request = list_request(project or self.project, page_size=page_size, filter=filter, summary=summary)
        while True:
            response = await self._call(self._stub.ListExports, request)
            for export in response.exports:
                yield export
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    async def cancel_export(self, name: str, *, etag: str = "") -> pb.Export:
        """Cancel an export; with ``etag``, only if it has not changed since."""
        return await self._call(self._stub.CancelExport, pb.CancelExportRequest(name=self._name(name), etag=etag))

    async def retry_export(self, name: str, *, etag: str = "") -> pb.Export:
        """Run an unsuccessful export again."""
        return await self._call(self._stub.RetryExport, pb.RetryExportRequest(name=self._name(name), etag=etag))

    async def delete_export(self, name: str, *, etag: str = "") -> None:
        """Forget an ended export."""
        await self._call(self._stub.DeleteExport, pb.DeleteExportRequest(name=self._name(name), etag=etag))

    async def watch_export(
        self, name: str, *, after_sequence: int = 0, patience_seconds: float = 120.0
    ) -> AsyncIterator[pb.ExportEvent]:
        """Yield events until the export ends; see :meth:`slipway.client.Client.watch_export`."""
        watch = Resumption(after_sequence, patience_seconds=patience_seconds)
        while True:
            async for event in self._watch_once(self._name(name), watch):
                if isinstance(event, Failure):
                    await asyncio.sleep(watch.pause_seconds(event))
                else:
                    yield event
            if watch.ended:
                return

    async def _watch_once(self, name: str, watch: Resumption) -> AsyncIterator[pb.ExportEvent | Failure]:
        """Yield new events over one connection; if it breaks before the export ends, yield the failure last."""
        request = pb.WatchExportRequest(name=name, after_sequence=watch.sequence)
        call: Any = self._stub.WatchExport(request, metadata=self._metadata())
        try:
            with self._channel.calling():
                async for event in call:
                    if watch.is_new(event):
                        yield event
        except grpc.aio.AioRpcError as error:
            yield self._failure(error)
        else:
            watch.ended = True  # the server closed the stream regularly; a server that stops would cancel it
        finally:
            call.cancel()

    async def watch_exports(
        self,
        *,
        project: str = "",
        filter: str = "",  # noqa: A002 - the field's name everywhere
        cursor: str = "",
        include_progress: bool = False,
        patience_seconds: float = 120.0,
    ) -> AsyncGenerator[pb.ExportsEvent, None]:
        """Yield what happens to a project's exports, without end; see :meth:`slipway.client.Client.watch_exports`."""
        request = watch_request(
            project or self.project, filter=filter, cursor=cursor, include_progress=include_progress
        )
        watch = ExportsResumption(request, patience_seconds=patience_seconds)
        while True:
            async for event in self._watch_exports_once(watch):
                if isinstance(event, Failure):
                    await asyncio.sleep(watch.pause_seconds(event))
                else:
                    yield event

    async def _watch_exports_once(self, watch: ExportsResumption) -> AsyncIterator[pb.ExportsEvent | Failure]:
        """Yield events over one connection, and at the end why it ended."""
        call: Any = self._stub.WatchExports(watch.request, metadata=self._metadata())
        try:
            with self._channel.calling():
                async for event in call:
                    yield watch.note(event)
            yield ended_early()
        except grpc.aio.AioRpcError as error:
            yield self._failure(error)
        finally:
            call.cancel()

    async def list_formats(self, *, page_size: int = 0) -> AsyncIterator[coordinator_pb2.Format]:
        """Yield the formats that the coordinator knows, and whether its workers can make them now."""
        request = coordinator_pb2.ListFormatsRequest(page_size=page_size)
        while True:
            response = await self._call(self._coordinator_stub.ListFormats, request)
            for each in response.formats:
                yield each
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    async def validation_obstacle(self) -> Failure | None:
        """Return why no live worker can judge outputs; see :meth:`slipway.client.Client.validation_obstacle`."""
        request = coordinator_pb2.ListFormatsRequest(page_size=1)
        return obstacle_of(await self._call(self._coordinator_stub.ListFormats, request))

    async def list_workers(self, *, page_size: int = 0) -> coordinator_pb2.ListWorkersResponse:
        """Return the workers that are alive and the tasks that wait for one; see :meth:`slipway.client.Client.list_workers`."""
        request = coordinator_pb2.ListWorkersRequest(page_size=page_size)
        response = await self._call(self._coordinator_stub.ListWorkers, request)
        while response.next_page_token:
            request.page_token = response.next_page_token
            add_page(response, await self._call(self._coordinator_stub.ListWorkers, request))
        return response

    async def list_projects(self, *, page_size: int = 0) -> AsyncIterator[coordinator_pb2.Project]:
        """Yield the projects that the caller may see, with their limits and what they use."""
        request = coordinator_pb2.ListProjectsRequest(page_size=page_size)
        while True:
            response = await self._call(self._coordinator_stub.ListProjects, request)
            for each in response.projects:
                yield each
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    async def push_artifact(
        self, source: str | Path | Mapping[str, Path], *, project: str = "", on_bytes: OnBytes | None = None
    ) -> str:
        """Upload files; see :meth:`slipway.client.Client.push_artifact`."""
        return await self._in_thread(
            lambda client, tell: client.push_artifact(source, project=project, on_bytes=tell), on_bytes
        )

    async def pull_artifact(
        self, digest: str, folder: str | Path, *, project: str = "", on_bytes: OnBytes | None = None
    ) -> Path:
        """Write an artifact's verified files into a new folder, all or none; return the folder."""
        return await self._in_thread(
            lambda client, tell: client.pull_artifact(digest, folder, project=project, on_bytes=tell), on_bytes
        )

    async def get_artifact(self, digest: str, *, project: str = "") -> artifact_pb2.Artifact:
        """Return the files of an artifact."""
        name = artifact_name(digest, project=project or self.project)
        return await self._call(self._artifact_stub.GetArtifact, artifact_pb2.GetArtifactRequest(name=name))

    async def delete_artifact(self, digest: str, *, project: str = "", allow_missing: bool = False) -> list[str]:
        """Give up an artifact that was pushed; see :meth:`slipway.client.Client.delete_artifact`."""
        name = artifact_name(digest, project=project or self.project)
        request = artifact_pb2.DeleteArtifactRequest(name=name, allow_missing=allow_missing)
        return list((await self._call(self._artifact_stub.DeleteArtifact, request)).exports)

    async def list_artifacts(self, *, project: str = "", page_size: int = 0) -> AsyncIterator[str]:
        """Yield the digests of a project's artifacts (``-``: of all projects), sorted, fetched page by page."""
        parent = sendable(f"projects/{project or self.project}")
        request = artifact_pb2.ListArtifactsRequest(parent=parent, page_size=page_size)
        while True:
            response = await self._call(self._artifact_stub.ListArtifacts, request)
            for digest in response.digests:
                yield digest
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    async def _in_thread(self, transfer: Callable[[Client, OnBytes], T], on_bytes: OnBytes | None) -> T:
        """Run a transfer with the blocking client in a thread, because file access blocks; cancellation stops it soon."""
        stopped = threading.Event()

        def tell(count: int) -> None:
            if stopped.is_set():
                raise ServiceError("the transfer was cancelled", reason="CANCELLED")
            if on_bytes is not None:
                on_bytes(count)

        def run() -> T:
            with Client(self.address, security=self._security, project=self.project) as client:
                return transfer(client, tell)

        try:
            return await asyncio.to_thread(run)
        finally:
            stopped.set()

    def _name(self, name: str) -> str:
        return export_name(name, project=self.project)

    @property
    def _stub(self) -> ExportServiceStub:
        return ExportServiceStub(self._channel.current())

    @property
    def _coordinator_stub(self) -> CoordinatorServiceStub:
        return CoordinatorServiceStub(self._channel.current())

    @property
    def _artifact_stub(self) -> ArtifactServiceStub:
        return ArtifactServiceStub(self._channel.current())

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return with_trace(self._channel.identity.metadata())

    def _failure(self, error: grpc.RpcError) -> Failure:
        return failure_of_call(error, address=self.address, encrypted=self._channel.identity.encrypted)

    async def _call(self, method: Callable[..., T], request: object) -> T:
        # The stubs are typed like those of blocking channels, whose responses are not awaited.
        call: Any = method(request, timeout=self._timeout, metadata=self._metadata())
        try:
            with self._channel.calling():
                answer: T = await call
        except grpc.aio.AioRpcError as error:
            raise self._failure(error).error() from error
        return answer
