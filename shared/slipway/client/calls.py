"""Blocking calls to a coordinator: the connection, the caller's identity, and the translation of errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self, TypeVar

import grpc

from slipway.client.requests import TIMEOUT_SECONDS, Metadata, with_trace
from slipway.errors import Failure
from slipway.rpc.call_ends import failure_of_call
from slipway.security.channels import BlockingChannel
from slipway.settings.security import Security
from slipway_protos.v1.artifact_pb2_grpc import ArtifactServiceStub
from slipway_protos.v1.export_pb2_grpc import ExportServiceStub

T = TypeVar("T")


class BlockingCalls:
    """A connection, open until :meth:`close`. Safe for several threads.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        security: Certificates and token; None connects without TLS and token.
        timeout_seconds: Longest time of one call that is not a stream.

    Raises:
        ConfigurationError: A file of ``security`` cannot be used.
    """

    def __init__(
        self, address: str, *, security: Security | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.address = address
        self._timeout = timeout_seconds
        self._channel = BlockingChannel(address, security)

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
