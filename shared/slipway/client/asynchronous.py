"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from slipway.client.requests import DEFAULT_PROJECT, TIMEOUT_SECONDS, create_request, export_name, with_trace
from slipway.client.resumption import Resumption
from slipway.configuration import ExportConfiguration
from slipway.errors import Failure
from slipway.security.channels import AsyncChannel
from slipway.security.settings import Security
from slipway.wire import failure_of_call
from slipway_protos.v1 import export_pb2 as pb
from slipway_protos.v1.export_pb2_grpc import ExportServiceStub


class AsyncClient:
    """The methods of :class:`~slipway.client.Client` as coroutines and asynchronous iterators.

    Use it on one event loop, as a context manager: ``async with AsyncClient(address) as client: …``.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        security: Certificates and token; None connects in plain and shows none.
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
        self._channel = AsyncChannel(address, security)

    async def close(self) -> None:
        """Close the connection; calls under way end."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        )
        export: pb.Export = await self._call("CreateExport", request)
        return export

    async def get_export(self, name: str) -> pb.Export:
        """One export."""
        export: pb.Export = await self._call("GetExport", pb.GetExportRequest(name=self._name(name)))
        return export

    async def list_exports(
        self,
        *,
        project: str = "",
        page_size: int = 0,
        filter: str = "",  # noqa: A002 - the field's name everywhere
    ) -> AsyncIterator[pb.Export]:
        """Exports of a project that the filter takes, newest first, fetched page by page."""
        parent = f"projects/{project or self.project}"
        request = pb.ListExportsRequest(parent=parent, page_size=page_size, filter=filter)
        while True:
            response: pb.ListExportsResponse = await self._call("ListExports", request)
            for export in response.exports:
                yield export
            request.page_token = response.next_page_token
            if not request.page_token:
                return

    async def cancel_export(self, name: str, *, etag: str = "") -> pb.Export:
        """Ask an export to end; with ``etag``, only if it has not changed since."""
        export: pb.Export = await self._call("CancelExport", pb.CancelExportRequest(name=self._name(name), etag=etag))
        return export

    async def retry_export(self, name: str, *, etag: str = "") -> pb.Export:
        """Run an unsuccessful export again."""
        export: pb.Export = await self._call("RetryExport", pb.RetryExportRequest(name=self._name(name), etag=etag))
        return export

    async def delete_export(self, name: str, *, etag: str = "") -> None:
        """Forget an ended export."""
        await self._call("DeleteExport", pb.DeleteExportRequest(name=self._name(name), etag=etag))

    async def watch_export(
        self, name: str, *, after_sequence: int = 0, patience_seconds: float = 120.0
    ) -> AsyncIterator[pb.ExportEvent]:
        """What happens until the export ends; see :meth:`slipway.client.Client.watch_export`."""
        watch = Resumption(after_sequence, patience_seconds=patience_seconds)
        while True:
            async for event in self._connected(self._name(name), watch):
                if isinstance(event, Failure):
                    await asyncio.sleep(watch.pause_seconds(event))
                else:
                    yield event
            if watch.ended:
                return

    async def _connected(self, name: str, watch: Resumption) -> AsyncIterator[pb.ExportEvent | Failure]:
        """New events over one connection; last, why it ended before the export did."""
        request = pb.WatchExportRequest(name=name, after_sequence=watch.sequence)
        call: Any = self._stub.WatchExport(request, metadata=self._metadata())
        try:
            async for event in call:
                if watch.is_new(event):
                    yield event
        except grpc.aio.AioRpcError as error:
            yield failure_of_call(error, address=self.address)
        else:
            watch.ended = (
                True  # a server that goes away cancels the stream; one that ends it in order has no more to say
            )
        finally:
            call.cancel()

    def _name(self, name: str) -> str:
        return export_name(name, project=self.project)

    @property
    def _stub(self) -> ExportServiceStub:
        return ExportServiceStub(self._channel.current())

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return with_trace(self._channel.identity.metadata())

    async def _call(self, method: str, request: object) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=self._timeout, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise failure_of_call(error, address=self.address).error() from error
