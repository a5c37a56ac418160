"""The HTTP application: it finds the call of a request, makes it, and sends its response."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from importlib import resources
from typing import cast

from google.protobuf.message import Message

from slipway.console.rendering import ROOT
from slipway.errors import ModelExportError, ServiceError
from slipway.rpc.values import status_of
from slipway.security.access.rules import RULES, Rule
from slipway.security.interceptor import check_project, check_role, current_principal
from slipway.security.origins import check_origin
from slipway.texts import number_of
from slipway_coordinator.api.requests import field_error
from slipway_coordinator.http.calls import Handlers, HttpContext, run_call
from slipway_coordinator.http.console import coordinator_console
from slipway_coordinator.http.errors import HttpError
from slipway_coordinator.http.messages import bare_request_of, content_request_of, request_of
from slipway_coordinator.http.requests import HttpRequest, Receive, Scope, Send
from slipway_coordinator.http.responses import (
    Content,
    ConvertedChanges,
    Document,
    Events,
    Response,
    send_document,
    send_status,
)
from slipway_coordinator.http.routes import Route, Routes
from slipway_protos.v1.artifact_pb2 import ReadBlobRequest

log = logging.getLogger("slipway.coordinator.http")

SERVICES = ("slipway.v1.ExportService", "slipway.v1.ArtifactService", "slipway.v1.CoordinatorService")

_HEALTH, _DESCRIPTION = "/healthz", "/openapi.json"
_SMALL_BYTES = 4 << 10
_LARGEST_NUMBER = (1 << 63) - 1


class HttpApplication:
    """An ASGI application over the calls of a server.

    Args:
        handlers: Finds a call behind all checks.
        active: Whether the coordinator takes calls.
        names: Names by which it may be called, besides addresses; None for all. See :func:`check_origin`.
    """

    def __init__(self, handlers: Handlers, *, active: Callable[[], bool], names: Collection[str] | None) -> None:
        self._handlers = handlers
        self._active = active
        self._names = names
        self._routes = Routes(*SERVICES)
        self._console = coordinator_console(handlers)
        self._calls: set[asyncio.Task[None]] = set()
        self._ending = False
        self._changes = ConvertedChanges()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            request = HttpRequest(scope, receive)
            if _is_of_console(request.path):
                check_origin(request.header, names=self._names)
                await self._console(scope, receive, send)
            else:
                await self._serve(request, send, scope["state"]["abort"])
        except HttpError as refusal:
            await send_status(send, status_of(refusal.error.failure()), http=refusal.status, headers=refusal.headers)
        except ModelExportError as error:
            await send_status(send, status_of(error.failure()))

    async def _serve(self, request: HttpRequest, send: Send, abort: Callable[[], None]) -> None:
        check_origin(request.header, names=self._names)
        if request.path in {_HEALTH, _DESCRIPTION}:
            await self._serve_page(request, send)
            return
        route, path = self._routes.find(request.verb, request.path)
        if route.rule.body == "*" and request.has_body:
            request.check_json()
        if self._ending:
            raise _ending_error()
        await self._serve_call(route, path, request, send, abort)

    async def close(self) -> None:
        """End the calls that are under way."""
        self._ending = True
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    async def _serve_page(self, request: HttpRequest, send: Send) -> None:
        if request.verb not in {"GET", "HEAD"}:
            error = ServiceError("this path is only read", reason="CALL_NOT_FOUND", remedy="use GET")
            raise HttpError(error, 405, headers={"allow": "GET, HEAD"})
        if request.path == _DESCRIPTION:
            document = resources.files("slipway_protos").joinpath("v1/openapi.json").read_bytes()
            await send_document(send, 200, document, {"cache-control": "max-age=300"})
        elif self._active():
            await send_document(send, 200, '{"status":"SERVING"}')
        else:
            await send_document(send, 503, '{"status":"NOT_SERVING"}')

    async def _serve_call(
        self, route: Route, path: Mapping[str, str], request: HttpRequest, send: Send, abort: Callable[[], None]
    ) -> None:
        """Make a call; cancel it when its client leaves, as gRPC does."""
        response = _response(route, request, send, self._changes)
        call = asyncio.create_task(self._call(route, path, request, response))
        gone = asyncio.create_task(request.wait_for_disconnect())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (call, gone):
                task.cancel()
            await asyncio.wait({call, gone})
        await _finish(route, call, response, abort, ending=self._ending)

    async def _call(self, route: Route, path: Mapping[str, str], request: HttpRequest, response: Response) -> None:
        events = response if isinstance(response, Events) else None
        context = HttpContext(request, response.write, None if events is None else events.admit)
        async with contextlib.nullcontext() if events is None else events.beating():
            requests = _requests(route, path, request, response)
            message = await run_call(self._handlers, route.method, requests, context)
        if context.status is None or (isinstance(response, Content) and response.is_enough):
            await response.end(message)
            return
        if response.begun and isinstance(response, Content):
            raise ServiceError("the content ended early", reason="CANCELLED")
        await response.fail(context.status, http=413 if request.is_too_large else 0)


async def _finish(
    route: Route, call: asyncio.Task[None], response: Response, abort: Callable[[], None], *, ending: bool
) -> None:
    """Send what ended a call that could not send it itself; end the connection if its response has begun."""
    if call.cancelled():
        error: BaseException | None = _ending_error()
        can_tell = ending and (isinstance(response, Events) or not response.begun)
    else:
        error, can_tell = call.exception(), not response.begun
    if error is None:
        return
    if not isinstance(error, ModelExportError | TimeoutError):
        log.error(f"{route.method} failed", exc_info=error)
        error = ServiceError(f"{route.method.rpartition('/')[2]} failed", reason="INTERNAL")
    if not can_tell or not isinstance(error, ModelExportError):
        abort()
        return
    try:
        await response.fail(status_of(error.failure()))
    except TimeoutError:
        abort()


def _is_of_console(path: str) -> bool:
    return path == ROOT or path.startswith(f"{ROOT}/")


def _ending_error() -> ServiceError:
    return ServiceError("this coordinator is ending", reason="COORDINATOR_UNAVAILABLE", remedy="try again")


def _response(route: Route, request: HttpRequest, send: Send, changes: ConvertedChanges) -> Response:
    if not route.streams_responses:
        return Document(send)
    if not route.returns_content:
        return Events(send, resumed=_last_event(request) is not None, changes=changes)
    return Content(send, route.rule.response_body, ranged=request.range is not None, head=request.verb == "HEAD")


async def _requests(
    route: Route, path: Mapping[str, str], request: HttpRequest, response: Response
) -> AsyncIterator[bytes]:
    """Yield the requests of a call, serialized."""
    if route.streams_requests:
        async for message in _content_requests(route, path, request):
            yield message.SerializeToString()
        return
    rule = RULES[route.method]
    # What others send is neither read nor parsed: the checks behind, which refuse them, need only the path.
    if not _is_admitted(rule, route, path):
        yield bare_request_of(route, path).SerializeToString()
        return
    body = await request.body(most=rule.max_bytes)
    if len(body) + len(request.query) > _SMALL_BYTES:  # other calls go on while it is parsed
        message = await asyncio.to_thread(request_of, route, path, request.query, body)
    else:
        message = request_of(route, path, request.query, body)
    if isinstance(response, Content):
        _set_part(cast("ReadBlobRequest", message), request, response)  # the only request for content
    elif isinstance(response, Events):
        _resume(message, request)
    yield message.SerializeToString()


def _set_part(message: ReadBlobRequest, request: HttpRequest, response: Content) -> None:
    """Ask for the part of a content that the ``Range`` header names, or else the query."""
    if request.range is not None:
        for field in ("offset", "limit"):
            if getattr(message, field):
                raise field_error(field, getattr(message, field), "is not given together with a Range header")
        message.offset, message.limit = request.range
    response.offset, response.limit = message.offset, message.limit


def _is_admitted(rule: Rule, route: Route, path: Mapping[str, str]) -> bool:
    """Return whether the caller may make a call, before its request is parsed: JSON costs more than gRPC's messages."""
    principal = current_principal.get()
    try:
        check_role(rule, principal, route.method)
        if rule.resource in path:
            check_project(principal, rule.resource, path[rule.resource])
    except ModelExportError:
        return False
    return True


def _resume(message: Message, request: HttpRequest) -> None:
    """Let a request for events continue after the last one that its client has seen, whatever its query says."""
    number, text = _last_event(request), request.header("last-event-id")
    if "cursor" in message.DESCRIPTOR.fields_by_name:
        if text:
            message.cursor = text  # type: ignore[attr-defined]  # of requests for events of several exports
    elif number is not None:
        message.after_sequence = number  # type: ignore[attr-defined]  # of other requests for events


def _last_event(request: HttpRequest) -> int | None:
    return number_of(request.header("last-event-id"), most=_LARGEST_NUMBER)


async def _content_requests(route: Route, path: Mapping[str, str], request: HttpRequest) -> AsyncIterator[Message]:
    """Yield the requests of an upload: what it is, then its bytes."""
    first: Message = content_request_of(route, path, request.query)
    length = request.content_length
    if not first.size_bytes and length is not None:  # type: ignore[attr-defined]  # of any upload
        first.size_bytes = min(first.offset + length, _LARGEST_NUMBER)  # type: ignore[attr-defined]
    yield first
    async for chunk in request.chunks():
        message = route.new_request()
        setattr(message, route.rule.body, chunk)
        yield message
