"""Calls that come over HTTP: the same checks and methods as over gRPC, which see an HTTP request as the context of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from slipway.rpc.call_ends import STATUS_KEY
from slipway.rpc.serving import Context
from slipway_coordinator.http.requests import HttpRequest

Metadata = tuple[tuple[str, str | bytes], ...]

_PASSED = (b"authorization", b"traceparent")
"""Headers that a call reads as its metadata."""


@dataclass(frozen=True)
class _Details(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Metadata


@dataclass
class HttpContext:
    """What a call sees of its HTTP request; as much of gRPC's context as Slipway's checks and methods use.

    Attributes:
        request: The HTTP request.
        on_response: Sends a response of a stream.
        on_admitted: Called when the call may begin its stream of responses.
        status: How the call was ended; None while it was not.
    """

    request: HttpRequest
    on_response: Callable[[Message], Awaitable[None]] | None = None
    on_admitted: Callable[[], None] | None = None
    status: status_pb2.Status | None = None
    _trailing: Metadata = field(default=())

    def peer(self) -> str:
        """Return the address of the client, as gRPC writes it."""
        host, port = self.request.client
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return the names in the client's certificate, as gRPC does."""
        if not self.request.encrypted:
            return {"transport_security_type": [b"insecure"]}
        names = [name.encode() for name in self.request.certificate_names]
        return {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": names}

    def invocation_metadata(self) -> Metadata:
        """Return the headers that a call reads."""
        return tuple(
            (name.decode(), value.decode("latin-1")) for name, value in self.request.headers if name in _PASSED
        )

    def trailing_metadata(self) -> Metadata:
        """Return what the call was ended with."""
        return self._trailing

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status."""
        self._trailing = trailing_metadata
        self.status = status_pb2.Status(code=code.value[0], message=details)
        for key, value in trailing_metadata:
            if key == STATUS_KEY and isinstance(value, bytes):
                self.status = status_pb2.Status.FromString(value)
        raise grpc.aio.AbortError

    async def send_initial_metadata(self, _: Metadata) -> None:
        """Note that the call may begin its stream of responses."""
        if self.on_admitted is not None:
            self.on_admitted()

    async def write(self, response: Message) -> None:
        """Send a response of a stream."""
        assert self.on_response is not None
        await self.on_response(response)


Handlers = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
"""Returns the handler of a call behind all checks; see :meth:`slipway.security.renewing.RenewingServer.checked_handler`."""


async def run_call(
    handlers: Handlers, method: str, requests: AsyncIterator[bytes], context: HttpContext
) -> Message | None:
    """Run a call; return its response, or None if it has a stream of responses or was ended with a status.

    Args:
        handlers: Finds the call.
        method: Full name of the call.
        requests: Its requests, serialized; read only once the caller is known.
        context: Its context; holds the status of a call that was ended.
    """
    handler = await handlers(_Details(method, context.invocation_metadata()))
    call_context = cast("Context", context)
    try:
        if handler.response_streaming:
            await handler.stream_stream(requests, call_context)
            return None
        return cast("Message", await handler.stream_unary(requests, call_context))
    except grpc.aio.AbortError:
        return None
    finally:
        await asyncio.shield(_close(requests))


async def _close(requests: AsyncIterator[bytes]) -> None:
    close = getattr(requests, "aclose", None)
    if close is not None:
        await close()
