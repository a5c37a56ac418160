"""The console on the port for HTTP: its calls take the same way as all others, in the name of whoever has signed in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2
from starlette.applications import Starlette
from starlette.requests import Request

from slipway.client.calls import BlockingCalls, Metadata
from slipway.console.application import console
from slipway.console.at_coordinator import CoordinatorPlace, Following
from slipway.console.place import Place
from slipway.errors import ModelExportError
from slipway.rpc.call_ends import STATUS_KEY
from slipway.rpc.values import status_of
from slipway.security.channels import BlockingChannel
from slipway_coordinator.http.calls import Handlers, HttpContext, run_call
from slipway_coordinator.http.requests import HttpRequest

T = TypeVar("T")

_ADDRESS = "this coordinator"
_WAITING_EVENTS = 16


def coordinator_console(handlers: Handlers) -> Starlette:
    """Return the console of a coordinator.

    Args:
        handlers: Finds a call behind all checks.
    """
    following = Following()

    def place_of(request: Request, token: str) -> Place:
        channel = _Channel(handlers, _with_token(request, token), asyncio.get_running_loop())
        calls = BlockingCalls(_ADDRESS, channel=cast("BlockingChannel", channel))
        return CoordinatorPlace(calls, project="", following=following)

    return console(place_of, signing_in=True)


def _with_token(request: Request, token: str) -> HttpRequest:
    """Return a request as a call sees it: with the token as its header, unless it came with one, as from a proxy; and without a body."""
    headers = list(request.scope["headers"])
    if token and not request.headers.get("authorization"):
        headers.append((b"authorization", f"Bearer {token}".encode()))
    return HttpRequest({**request.scope, "headers": headers}, _nothing)


async def _nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


class _Channel:
    """Carries the calls of a blocking client inside the process, each run on the server's loop behind all its checks.

    It is what stubs and :class:`BlockingCalls` use of a channel.

    Args:
        handlers: Finds a call.
        request: The request in whose name the calls are made.
        loop: The server's loop.
    """

    def __init__(self, handlers: Handlers, request: HttpRequest, loop: asyncio.AbstractEventLoop) -> None:
        self._handlers, self._request, self._loop = handlers, request, loop
        self.identity = self
        self.encrypted = request.encrypted

    def metadata(self) -> Metadata:
        """Return nothing: the request has what says who calls."""
        return ()

    def stub(self, make: Callable[[Any], T]) -> T:
        """Return the stub of a service."""
        return make(self)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def calling(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call."""
        return contextlib.nullcontext()

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Message]:
        """Return a function that makes a call."""

        def call(request: Message, *, timeout: float | None = None, metadata: Any = ()) -> Message:
            del metadata
            context = HttpContext(self._request)
            making = run_call(self._handlers, method, _one(request), context)
            future = asyncio.run_coroutine_threadsafe(making, self._loop)
            try:
                response = future.result(timeout)
            except (TimeoutError, CancelledError):
                future.cancel()
                raise _ended(code_pb2.DEADLINE_EXCEEDED, "the call took too long") from None
            except ModelExportError as error:
                raise _Ended(status_of(error.failure())) from error
            if context.status is not None or response is None:
                raise _Ended(context.status or status_pb2.Status(code=code_pb2.UNKNOWN))
            return response

        return call

    def unary_stream(self, method: str, **_: Any) -> Callable[..., _Responses]:
        """Return a function that begins a call with a stream of responses."""

        def call(request: Message, *, timeout: float | None = None, metadata: Any = ()) -> _Responses:
            del timeout, metadata
            return _Responses(self._handlers, method, request, self._request, self._loop)

        return call

    def stream_unary(self, method: str, **_: Any) -> Callable[..., Message]:
        """Return a function for a call that pages do not make."""

        def call(*_: Any, **__: Any) -> Message:
            raise _ended(code_pb2.UNIMPLEMENTED, f"{method} is not made by pages")

        return call

    stream_stream = stream_unary


class _Responses:
    """The responses of a call, read by another thread."""

    def __init__(
        self, handlers: Handlers, method: str, message: Message, request: HttpRequest, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING_EVENTS)
        self._context = HttpContext(request, self._queue.put)
        self._call = asyncio.run_coroutine_threadsafe(self._run(handlers, method, message), loop)

    async def _run(self, handlers: Handlers, method: str, message: Message) -> None:
        try:
            await run_call(handlers, method, _one(message), self._context)
        finally:
            await self._queue.put(None)

    def __iter__(self) -> Iterator[Message]:
        while (response := self._next()) is not None:
            yield response
        if self._context.status is not None:
            raise _Ended(self._context.status)
        try:
            error = self._call.exception()
        except CancelledError:
            raise _ended(code_pb2.CANCELLED, "the call was ended") from None
        if isinstance(error, ModelExportError):
            raise _Ended(status_of(error.failure())) from error
        if error is not None:
            raise _ended(code_pb2.INTERNAL, "the call failed") from error

    def _next(self) -> Message | None:
        try:
            return asyncio.run_coroutine_threadsafe(self._queue.get(), self._loop).result()
        except (CancelledError, RuntimeError):  # the server ends
            raise _ended(code_pb2.CANCELLED, "the coordinator is ending") from None

    def cancel(self) -> None:
        """End the call."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._call.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()


class _Ended(grpc.RpcError):
    """The end of a call, as a client of gRPC gets it.

    Args:
        status: How it was ended.
    """

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self._status = status

    def code(self) -> grpc.StatusCode:
        """Return its code."""
        return grpc.StatusCode[code_pb2.Code.Name(self._status.code)]

    def details(self) -> str:
        """Return its text."""
        return str(self._status.message)

    def trailing_metadata(self) -> Any:
        """Return the status with its details."""
        return ((STATUS_KEY, self._status.SerializeToString()),) if self._status.details else ()


def _ended(code: int, message: str) -> _Ended:
    return _Ended(status_pb2.Status(code=code, message=message))


async def _one(message: Message) -> AsyncIterator[bytes]:
    yield message.SerializeToString()
