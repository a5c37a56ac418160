"""Calls to a coordinator: names and requests of both clients, resumed watches, and the blocking connection.

A watch is resumed after disconnects. The connection adds the caller's identity and translates errors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Self, TypeVar

import grpc

from slipway.configuration import ExportConfiguration
from slipway.errors import Failure, ServiceError
from slipway.observability.telemetry import current_traceparent
from slipway.reasons import REASONS, Category
from slipway.rpc.call_ends import failure_of_call
from slipway.rpc.messages import asked_configuration_message
from slipway.rpc.values import ENDED_STATES, failure_of_status, sendable
from slipway.security.channels import BlockingChannel
from slipway.settings.security import Security
from slipway_protos.v1 import coordinator_pb2
from slipway_protos.v1 import export_pb2 as pb
from slipway_protos.v1.artifact_pb2_grpc import ArtifactServiceStub
from slipway_protos.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from slipway_protos.v1.export_pb2_grpc import ExportServiceStub

DEFAULT_PROJECT = "default"
TIMEOUT_SECONDS = 30.0

Metadata = tuple[tuple[str, str], ...]

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0

T = TypeVar("T")


def export_name(export: str, *, project: str = DEFAULT_PROJECT) -> str:
    """Return the full name ``projects/{project}/exports/{export}`` of an export given by id; a full name stays as it is."""
    return sendable(export if export.startswith("projects/") else f"projects/{project}/exports/{export}")


def artifact_name(digest: str, *, project: str) -> str:
    """Return the full name of a project's artifact."""
    return sendable(f"projects/{project}/artifacts/{digest}")


def create_request(
    configuration: ExportConfiguration,
    *,
    sources: Mapping[str, str],
    labels: Mapping[str, str] | None,
    export_id: str,
    project: str,
    validate_only: bool,
    request_id: str,
    priority: int,
    source_formats: Mapping[str, str] | None,
) -> pb.CreateExportRequest:
    """Return the request of ``create_export``."""
    return pb.CreateExportRequest(
        parent=sendable(f"projects/{project}"),
        export_id=sendable(export_id),
        configuration=asked_configuration_message(configuration),
        sources=_texts(sources),
        labels=_texts(labels or {}),
        validate_only=validate_only,
        request_id=sendable(request_id),
        priority=priority,
        source_formats=_texts(source_formats or {}),
    )


def list_request(
    project: str,
    *,
    page_size: int,
    filter: str,  # noqa: A002 - the field's name everywhere
    summary: bool,
) -> pb.ListExportsRequest:
    """Return the request of ``list_exports`` for the first page."""
    view = pb.EXPORT_VIEW_SUMMARY if summary else pb.EXPORT_VIEW_FULL
    parent = sendable(f"projects/{project}")
    return pb.ListExportsRequest(parent=parent, page_size=page_size, filter=sendable(filter), view=view)


def watch_request(
    project: str,
    *,
    filter: str,  # noqa: A002 - the field's name everywhere
    cursor: str,
    include_progress: bool,
) -> pb.WatchExportsRequest:
    """Return the request of ``watch_exports``."""
    parent = sendable(f"projects/{project}")
    return pb.WatchExportsRequest(
        parent=parent, filter=sendable(filter), cursor=sendable(cursor), include_progress=include_progress
    )


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {sendable(name): sendable(value) for name, value in values.items()}


def with_trace(metadata: Metadata) -> Metadata:
    """Return a call's metadata with the trace it belongs to."""
    traceparent = current_traceparent()
    return (*metadata, ("traceparent", traceparent)) if traceparent else metadata


class _Reconnection:
    """How a watch goes on after disconnects.

    Args:
        patience_seconds: How long the coordinator may be unavailable at a time.
    """

    def __init__(self, *, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._was_connected = False
        self._gone_since: float | None = None
        self._failures = 0

    def note_connection(self) -> None:
        """Note that an event came."""
        self._was_connected, self._gone_since, self._failures = True, None, 0

    def pause_seconds(self, failure: Failure) -> float:
        """Return how long to wait before connecting again; raise at once if the first connection never succeeded.

        Raises:
            ModelExportError: The failure, if another connection cannot help or patience is over.
        """
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        patience = self._patience if self._was_connected else 0.0
        if not self._may_pass(failure) or now - self._gone_since >= patience:
            raise failure.error()
        self._failures += 1
        longest = min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures, 10), _LONGEST_PAUSE_SECONDS)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - so that many watchers do not return all at once

    def _may_pass(self, failure: Failure) -> bool:
        # A server ends streams when the caller's token does; its file may have another one by now.
        renewed = failure.reason == "UNAUTHENTICATED" and self._was_connected and not self._failures
        # A server that stops cancels its streams; a server also ends streams whose client reads too slowly.
        return renewed or is_temporary(failure, "CANCELLED", "TRANSFER_SLOW")


class Resumption(_Reconnection):
    """The state of one watch of an export, which is resumed after disconnects.

    Args:
        after_sequence: Number of the last event already seen.
        patience_seconds: How long the coordinator may be unavailable at a time.
    """

    def __init__(self, after_sequence: int, *, patience_seconds: float) -> None:
        super().__init__(patience_seconds=patience_seconds)
        self.sequence = after_sequence
        self.ended = False

    def is_new(self, event: pb.ExportEvent) -> bool:
        """Record an event; return False for one seen before the connection was lost."""
        self.note_connection()
        if event.sequence <= self.sequence:
            return False
        self.sequence = event.sequence
        self.ended = event.WhichOneof("event") == "export" and event.export.state in ENDED_STATES
        return True


class ExportsResumption(_Reconnection):
    """The state of one watch of several exports, which is resumed after disconnects.

    Args:
        request: The request of the first connection; :attr:`request` continues after the events that were recorded.
        patience_seconds: How long the coordinator may be unavailable at a time.
    """

    def __init__(self, request: pb.WatchExportsRequest, *, patience_seconds: float) -> None:
        super().__init__(patience_seconds=patience_seconds)
        self.request = request

    def note(self, event: pb.ExportsEvent) -> pb.ExportsEvent:
        """Record an event, and return it."""
        self.note_connection()
        self.request.cursor = event.cursor
        return event


def ended_early() -> Failure:
    """Return the failure of a stream without end that has ended regularly."""
    return ServiceError("the coordinator ended the stream", remedy="try again").failure()


def add_page(whole: coordinator_pb2.ListWorkersResponse, page: coordinator_pb2.ListWorkersResponse) -> None:
    """Add another page of workers to those before."""
    whole.workers.extend(page.workers)
    whole.next_page_token = page.next_page_token


def obstacle_of(response: coordinator_pb2.ListFormatsResponse) -> Failure | None:
    """Return why no live worker can judge outputs; None if one can."""
    return failure_of_status(response.validation_obstacle) if response.HasField("validation_obstacle") else None


def is_temporary(failure: Failure, *reasons: str) -> bool:
    """Return whether the same call may succeed later: the peer is unavailable, or the reason is one of those given."""
    return failure.reason in reasons or (
        failure.reason in REASONS and REASONS[failure.reason].category is Category.UNAVAILABLE
    )


class BlockingCalls:
    """A connection, open until :meth:`close`. Safe for several threads.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        security: Certificates and token; None connects without TLS and token.
        timeout_seconds: Longest time of one call that is not a stream.
        channel: Carries the calls, in place of a connection to the address.

    Raises:
        ConfigurationError: A file of ``security`` cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        security: Security | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        channel: BlockingChannel | None = None,
    ) -> None:
        self.address = address
        self._timeout = timeout_seconds
        self._channel = channel or BlockingChannel(address, security)

    def close(self) -> None:
        """Close the connection; calls under way end."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def exports(self) -> ExportServiceStub:
        """Stub over the current channel."""
        return self._channel.stub(ExportServiceStub)

    @property
    def coordinator(self) -> CoordinatorServiceStub:
        """Stub over the current channel."""
        return self._channel.stub(CoordinatorServiceStub)

    @property
    def artifacts(self) -> ArtifactServiceStub:
        """Stub over the current channel."""
        return self._channel.stub(ArtifactServiceStub)

    def metadata(self) -> Metadata:
        """Return the metadata of every call."""
        return with_trace(self._channel.identity.metadata())

    def calling(self) -> AbstractContextManager[None]:
        """Return the context that every call must be made in."""
        return self._channel.calling()

    def failure(self, error: grpc.RpcError) -> Failure:
        """Return the failure of a call."""
        return failure_of_call(error, address=self.address, encrypted=self._channel.identity.encrypted)

    def send(self, method: Callable[..., T], request: object) -> T:
        """Call a method; raise gRPC's own errors."""
        with self.calling():
            return method(request, timeout=self._timeout, metadata=self.metadata())

    def call(self, method: Callable[..., T], request: object) -> T:
        """Call a method.

        Raises:
            ModelExportError: With the coordinator's reason.
        """
        try:
            return self.send(method, request)
        except grpc.RpcError as error:
            raise self.failure(error).error() from error
