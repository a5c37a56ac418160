"""Common parts of all gRPC servers: options, health, reflection, and the translation of errors to statuses.

The health service is our own because the asyncio servicer of ``grpcio-health-checking`` has no ``List``, and sends to its
watchers while it holds a lock: one watcher that does not read would block all others and the server's shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection

from slipway.errors import Failure, ModelExportError, ServiceError
from slipway.observability.telemetry import is_traceparent
from slipway.rpc.call_ends import STATUS_KEY, call_status
from slipway.texts import number_of

log = logging.getLogger("slipway.rpc")

LONGEST_POLL_SECONDS = 50.0
"""Longest time that a poll waits: proxies and load balancers end calls that are silent for a minute."""

MAX_REQUEST_BYTES = 16 << 20
"""Largest request a server accepts: a worker's report."""

_MAX_STREAMS_PER_CONNECTION = 512

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.so_reuseport", 0),  # of two servers on one port, each would get half of the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # A token of an issuer has up to 8 KiB; above the first number gRPC refuses calls at random, above the second all of them.
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 24 << 10),
    ("grpc.max_concurrent_streams", _MAX_STREAMS_PER_CONNECTION),
    # Otherwise gRPC lets each stream of a fast client send megabytes ahead of what the server has asked for. A message that the
    # server has asked for always arrives as a whole. Uploads pay for it over long ways: 16 instead of 78 MB/s at 50 ms (docs/adr/0022).
    ("grpc.http2.bdp_probe", 0),
)

S = TypeVar("S")
Request = TypeVar("Request")
Response = TypeVar("Response")

Context = grpc.aio.ServicerContext[Any, Any]
Unary = Callable[[S, Request, Context], Awaitable[Response]]
Stream = Callable[[S, Request, Context], AsyncIterator[Response]]

before_failure: ContextVar[Callable[[Failure], None] | None] = ContextVar("slipway_before_failure", default=None)
"""What is done with the failure of the call being served before its caller hears of it."""

State = Any  # the number of a ServingStatus, whose stubs have no type for it

_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def unary(method: Unary[S, Request, Response]) -> Unary[S, Request, Response]:
    """Decorate a method that may raise :class:`ModelExportError`; the caller gets it as a status."""

    @functools.wraps(method)
    async def call(self: S, request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except ModelExportError as error:
            await abort(context, error.failure())
        except Exception as error:  # noqa: BLE001 - the boundary: the caller always gets a typed error
            await abort(context, _unforeseen_failure(method.__name__, error))

    return call


def stream(method: Stream[S, Request, Response]) -> Stream[S, Request, Response]:
    """Decorate a streaming method in the same way as :func:`unary`."""

    @functools.wraps(method)
    async def call(self: S, request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            answers: Any = method(self, request, context)
            async with contextlib.aclosing(answers):  # a caller that stops reading ends the method at once
                async for response in answers:
                    yield response
        except ModelExportError as error:
            await abort(context, error.failure())
        except Exception as error:  # noqa: BLE001 - as above
            await abort(context, _unforeseen_failure(method.__name__, error))

    return call


def call_traceparent(context: Context) -> str:
    """Return the span that a call belongs to, as its caller says; empty if it names none."""
    named = (value for key, value in context.invocation_metadata() or () if key == "traceparent")
    return next((value for value in named if isinstance(value, str) and is_traceparent(value)), "")


async def abort(context: Context, failure: Failure) -> NoReturn:
    """End a call with a failure."""
    if (act := before_failure.get()) is not None:
        act(failure)
    code, details, status = call_status(failure)
    await context.abort(code, details, trailing_metadata=((STATUS_KEY, status),))
    raise AssertionError("abort returned")


def _unforeseen_failure(method: str, error: Exception) -> Failure:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    log.exception(f"{method} failed")
    return ServiceError(f"{method} failed: {type(error).__name__}: {error}", reason="INTERNAL").failure()


def add_health_and_reflection(server: grpc.aio.Server, *services: str) -> HealthService:
    """Add health checks and reflection for a server's services."""
    health = HealthService()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((*services, HEALTH, reflection.SERVICE_NAME), server)
    return health


def listen(server: grpc.aio.Server, address: str, *, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind a server to ``HOST:PORT`` or ``unix:PATH``; return the port (0 binds a free one).

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` if the address cannot be bound.
    """
    check_port(address)
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise listen_error(address, str(error)) from error


def check_port(address: str) -> None:
    """Refuse a port number above 65535: libraries would cut it and listen on another port.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    port = "" if address.startswith("unix:") else address.rpartition(":")[2]
    if port.isdigit() and number_of(port, most=65535) is None:
        raise listen_error(address, "the highest port is 65535")


def listen_error(address: str, why: str) -> ServiceError:
    """Return the error for an address that cannot be bound."""
    return ServiceError(
        f"cannot listen on {address}: {why}",
        reason="REQUEST_INVALID",
        remedy="choose a free port, or end the program that uses it",
        about={"address": address},
    )


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Keeps the states of services by name; the empty name stands for the whole server."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()  # set at the next change, then replaced
        self._is_ending = False

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return the state of one service."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no service of this name")
        return health_pb2.HealthCheckResponse(status=state)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """Return the states of all services."""
        states = {name: health_pb2.HealthCheckResponse(status=state) for name, state in sorted(self._states.items())}
        return health_pb2.HealthListResponse(statuses=states)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Send the state of one service, now and whenever it changes."""
        told = None
        while True:
            changed, state = self._changed, self._states.get(request.service, _UNKNOWN)
            if state != told:
                yield health_pb2.HealthCheckResponse(status=state)
                told = state
            await changed.wait()

    def set_serving(self, *services: str, serving: bool) -> None:
        """Set whether some services, and the server as a whole, take calls. After :meth:`end` this has no effect."""
        if not self._is_ending:
            self._set(("", *services), serving=serving)

    def end(self) -> None:
        """Report from now on that no service takes calls."""
        self._is_ending = True
        self._set(tuple(self._states), serving=False)

    def _set(self, services: tuple[str, ...], *, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self._states.update(dict.fromkeys(services, state))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
