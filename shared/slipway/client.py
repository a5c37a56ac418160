"""A client of a coordinator: plain blocking calls, typed messages, and :class:`ModelExportError` for whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self, TypeVar

import grpc

from slipway.configuration import ExportConfiguration
from slipway.rpc import CHANNEL_OPTIONS
from slipway.telemetry import current_traceparent
from slipway.wire import configuration_message, failure_of_call
from slipway_protos.v1 import export_pb2, export_pb2_grpc

DEFAULT_PROJECT = "default"
_TIMEOUT_SECONDS = 30.0

T = TypeVar("T")


def export_name(export: str, *, project: str = DEFAULT_PROJECT) -> str:
    """The full name ``projects/{project}/exports/{export}`` of an export given by id; a full name stays as it is."""
    return export if export.startswith("projects/") else f"projects/{project}/exports/{export}"


class Client:
    """Calls ``slipway.v1.ExportService``. Exports may be named by id or in full.

    Every method raises :class:`~slipway.errors.ModelExportError` with the reason the coordinator gave, or
    ``COORDINATOR_UNAVAILABLE`` when it does not answer.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        timeout_seconds: Longest time one call may take; watching has no limit.
    """

    def __init__(self, address: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self.address = address
        self._timeout = timeout_seconds
        self._channel = grpc.insecure_channel(address, options=list(CHANNEL_OPTIONS))
        self._stub = export_pb2_grpc.ExportServiceStub(self._channel)

    def close(self) -> None:
        """Close the connection; calls under way end."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_export(
        self,
        configuration: ExportConfiguration,
        *,
        sources: Mapping[str, str],
        labels: Mapping[str, str] | None = None,
        export_id: str = "",
        project: str = DEFAULT_PROJECT,
        validate_only: bool = False,
    ) -> export_pb2.Export:
        """Create an export; the same request again answers with the export it made before.

        Args:
            configuration: What to do.
            sources: Digests of the artifacts ``base``, ``adapter`` and perhaps ``heldout``.
            labels: For people.
            export_id: Last part of the name; chosen by the coordinator when empty.
            project: Who it belongs to.
            validate_only: Plan and check only.
        """
        request = export_pb2.CreateExportRequest(
            parent=f"projects/{project}",
            export_id=export_id,
            configuration=configuration_message(configuration),
            sources=dict(sources),
            labels=dict(labels or {}),
            validate_only=validate_only,
        )
        return self._call(self._stub.CreateExport, request)

    def get_export(self, name: str) -> export_pb2.Export:
        """One export."""
        return self._call(self._stub.GetExport, export_pb2.GetExportRequest(name=export_name(name)))

    def list_exports(self, *, project: str = DEFAULT_PROJECT) -> Iterator[export_pb2.Export]:
        """All exports of a project, newest first."""
        token = ""
        while True:
            request = export_pb2.ListExportsRequest(parent=f"projects/{project}", page_token=token)
            response = self._call(self._stub.ListExports, request)
            yield from response.exports
            token = response.next_page_token
            if not token:
                return

    def cancel_export(self, name: str) -> export_pb2.Export:
        """Ask an export to end."""
        return self._call(self._stub.CancelExport, export_pb2.CancelExportRequest(name=export_name(name)))

    def retry_export(self, name: str) -> export_pb2.Export:
        """Run an unsuccessful export again."""
        return self._call(self._stub.RetryExport, export_pb2.RetryExportRequest(name=export_name(name)))

    def delete_export(self, name: str) -> None:
        """Forget an ended export."""
        self._call(self._stub.DeleteExport, export_pb2.DeleteExportRequest(name=export_name(name)))

    def watch_export(self, name: str, *, after_sequence: int = 0) -> Iterator[export_pb2.ExportEvent]:
        """What happens until the export ends, beginning with its current state.

        Closing the iterator ends the call. After an error, call again with the last sequence seen.
        """
        request = export_pb2.WatchExportRequest(name=export_name(name), after_sequence=after_sequence)
        call = self._stub.WatchExport(request, metadata=_metadata())
        try:
            yield from call
        except grpc.RpcError as error:
            raise failure_of_call(error, address=self.address).error() from error
        finally:
            call.cancel()

    def _call(self, method: Callable[..., T], request: object) -> T:
        try:
            return method(request, timeout=self._timeout, metadata=_metadata())
        except grpc.RpcError as error:
            raise failure_of_call(error, address=self.address).error() from error


def _metadata() -> tuple[tuple[str, str], ...]:
    traceparent = current_traceparent()
    return (("traceparent", traceparent),) if traceparent else ()
