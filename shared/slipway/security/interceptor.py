"""The one place where a server admits or refuses calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from slipway.errors import ArtifactError, ModelExportError, ServiceError
from slipway.observability import metrics
from slipway.rpc.serving import Context, abort, before_failure
from slipway.security.access.audit import AUDITED, Attempt, audit_attempt
from slipway.security.access.callers import ANONYMOUS, Authenticator, Callers, host_of
from slipway.security.access.principals import OWNER, WORKERS, Principal
from slipway.security.access.rules import RULES, Rule
from slipway.security.incoming import SMALL_BYTES, Incoming, Room, check_fields, next_message
from slipway.security.limits import Limits, OpenStreams, check_request, check_size
from slipway.security.measuring import measure_call
from slipway.security.rechecking import check_unchanged, rechecking

log = logging.getLogger("slipway.security")

current_principal: ContextVar[Principal] = ContextVar("slipway_principal", default=OWNER)
"""The caller of the call being served."""

Parse = Callable[[bytes], Any]


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only its stubs are generic
    """Identifies, authorizes and limits every call of a server.

    Args:
        authenticator: Identifies callers.
        encrypted_only: On connections without TLS, serve only RPCs that are open to everybody.
        limits: Limits of one client.
        rules: Rule of each RPC.
        audits: Whether to write the audit log; see :mod:`slipway.security.access.audit`.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        encrypted_only: bool = False,
        limits: Limits | None = None,
        rules: Mapping[str, Rule] = RULES,
        audits: bool = False,
    ) -> None:
        self._callers = Callers(authenticator, encrypted_only=encrypted_only)
        self._limits = limits or Limits()
        self._rules = rules
        self._audits = audits
        self._streams = OpenStreams(self._limits)
        self._incoming = Incoming(self._limits)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Put the checks before a method's handler."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return cast("grpc.RpcMethodHandler[Any, Any]", None)  # UNIMPLEMENTED
        # To gRPC every method is one of streams, so it receives only the messages that the checks request. So the server keeps and
        # parses nothing of unknown callers.
        if handler.response_streaming:
            answering: Any = self._handle_stream(handler_call_details, handler)
            return grpc.stream_stream_rpc_method_handler(answering, response_serializer=handler.response_serializer)
        answering = self._handle_unary(handler_call_details, handler)
        return grpc.stream_unary_rpc_method_handler(answering, response_serializer=handler.response_serializer)

    def _handle_unary(self, details: grpc.HandlerCallDetails, handler: Any) -> Any:
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def call(stream: AsyncIterator[bytes], context: Context) -> Any:
            with self._audit(details, handler, context) as attempt:
                try:
                    rule, principal = await self._identify(details, context)
                    room = self._choose_room(rule, principal, context)
                    if handler.request_streaming:
                        check_role(rule, principal, str(details.method))
                        requests = self._read_requests(rule, principal, stream, room, _make_parser(details, handler))
                        async with self._count_stream(principal, context):
                            return await behaviour(requests, context)
                    async with contextlib.AsyncExitStack() as place:
                        attempt.data = await _read_only_message(stream, room, rule, keeping=place)
                        check_role(rule, principal, str(details.method))
                        attempt.request = await _parse_request(rule, attempt.data, _make_parser(details, handler))
                        self._check(rule, principal, attempt.request)
                        async with _limit_time(f"{details.method} took longer", rule.seconds):
                            attempt.response = await behaviour(attempt.request, context)
                except ModelExportError as error:
                    await _abort(context, error)
                return attempt.response

        return call

    def _handle_stream(self, details: grpc.HandlerCallDetails, handler: Any) -> Any:
        behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def call(stream: AsyncIterator[bytes], context: Context) -> None:
            with self._audit(details, handler, context) as attempt:
                try:
                    rule, principal = await self._identify(details, context)
                    room = self._choose_room(rule, principal, context)
                    if handler.request_streaming:
                        check_role(rule, principal, str(details.method))
                        attempt.request = self._read_requests(
                            rule, principal, stream, room, _make_parser(details, handler)
                        )
                    else:
                        attempt.data = await _read_only_message(stream, room, rule)
                        check_role(rule, principal, str(details.method))
                        attempt.request = await _parse_request(rule, attempt.data, _make_parser(details, handler))
                        self._check(rule, principal, attempt.request)
                    async with (
                        self._count_stream(principal, context),
                        self._recheck(rule, principal, attempt.request, details, context),
                    ):
                        await self._send_responses(behaviour(attempt.request, context), context, attempt)
                except ModelExportError as error:
                    await _abort(context, error)

        return call

    @contextlib.contextmanager
    def _audit(self, details: grpc.HandlerCallDetails, handler: Any, context: Context) -> Iterator[Attempt]:
        """Track a call's outcome: count and time it, and write it to the audit log if the method changes something."""
        method = str(details.method)

        def read(data: bytes) -> Any:
            check_size(
                data, SMALL_BYTES
            )  # parsing a large refused request for its name alone would block the event loop
            return _make_parser(details, handler)(data)

        is_written = self._audits and method in AUDITED
        attempt = Attempt(method, context, caller=current_principal.get, read=read, is_written=is_written)
        before_failure.set(attempt.write_failure)
        name = method.removeprefix("/") if method in self._rules else "other"
        timed = not handler.response_streaming
        with measure_call(name, context, timed=timed, traceparent=attempt.traceparent), audit_attempt(attempt):
            yield attempt

    async def _read_requests(
        self, rule: Rule, principal: Principal, stream: AsyncIterator[bytes], room: Room, parse: Parse
    ) -> AsyncIterator[Any]:
        """Yield the requests of a stream, checked one by one; the first one names the resource.

        Raises:
            ServiceError: As :func:`_parse_request`, :meth:`_check` and :func:`next_message`.
        """
        about = rule.resource
        while (data := await next_message(stream, room, seconds=rule.seconds)) is not None:
            request = await _parse_request(rule, data, parse)
            self._check(rule, principal, request, about=about)
            yield request
            about = ""

    async def _send_responses(self, responses: Any, context: Context, attempt: Attempt) -> None:
        """Send a method's responses; end the call of a reader that does not take a message in time."""
        if not hasattr(responses, "__aiter__"):
            await responses  # it writes to the context itself
            return
        try:
            async for response in responses:
                attempt.note_response(response)
                try:
                    async with asyncio.timeout(self._limits.write_seconds):
                        await context.write(response)
                except TimeoutError as error:
                    seconds = self._limits.write_seconds
                    raise ServiceError(
                        f"the stream was not read for {seconds:g} s",
                        reason="TRANSFER_SLOW",
                        remedy="resume after the last message read, and read faster",
                    ) from error
        finally:
            await responses.aclose()

    async def _identify(self, details: grpc.HandlerCallDetails, context: Context) -> tuple[Rule, Principal]:
        """Return the rule of a call, and its caller.

        Raises:
            ServiceError: reason ``UNAUTHENTICATED``, or ``PERMISSION_DENIED`` for a call without a rule.
        """
        current_principal.set(ANONYMOUS)
        method = str(details.method)
        rule = self._rules.get(method)
        if rule is None:
            raise denied_error(f"{method} has no access rule", remedy="report it: this is a fault of the server")
        if not rule.roles:
            return rule, await self._callers.identify_if_shown(context)
        principal = await self._callers.identify(context)
        current_principal.set(principal)
        return rule, principal

    def _choose_room(self, rule: Rule, principal: Principal, context: Context) -> Room:
        """Return the function that opens a place for a caller's message."""
        if principal is ANONYMOUS:
            return lambda: self._incoming.unnamed(host_of(context))
        if rule.roles == WORKERS and principal.roles & WORKERS:
            return lambda: self._incoming.of_worker(principal.name)
        return lambda: self._incoming.of_client(principal.name)

    @contextlib.asynccontextmanager
    async def _count_stream(self, principal: Principal, context: Context) -> AsyncIterator[None]:
        """Count a stream as its caller's while the block runs.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED``.
        """
        if principal is ANONYMOUS:
            async with self._streams.unnamed(host_of(context)):
                yield
        else:
            with self._streams.one(principal.name):
                yield

    @contextlib.asynccontextmanager
    async def _recheck(
        self, rule: Rule, principal: Principal, request: Any, details: grpc.HandlerCallDetails, context: Context
    ) -> AsyncIterator[None]:
        """Check the rights of a caller again and again while the block runs, if the rule says so.

        Raises:
            ServiceError: reason ``UNAUTHENTICATED``, ``PERMISSION_DENIED`` or ``RIGHTS_CHANGED``.
        """

        async def check() -> None:
            now = await self._callers.identify(context)
            check_role(rule, now, str(details.method))
            if rule.resource:
                check_project(now, rule.resource, str(getattr(request, rule.resource)))
            check_unchanged(principal, now)

        if not rule.rechecked:
            yield
            return
        async with rechecking(check, seconds=self._limits.recheck_seconds):
            yield

    def _check(self, rule: Rule, principal: Principal, request: Any, *, about: str | None = None) -> None:
        """Check the limits of a request and its resource (the rule's field, or ``about`` if given).

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED``, ``REQUEST_INVALID``, ``PERMISSION_DENIED`` or one of
                :func:`check_project`.
        """
        if rule.plain:
            check_request(request, self._limits)
        about = rule.resource if about is None else about
        if about:
            check_project(principal, about, str(getattr(request, about)))


async def _parse_request(rule: Rule, data: bytes, parse: Parse) -> Any:
    """Parse a request; a large one in a thread, so that other calls go on meanwhile.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED`` or ``REQUEST_INVALID``.
    """
    check_size(data, rule.max_bytes)
    try:
        return await asyncio.to_thread(parse, data) if len(data) > SMALL_BYTES else parse(data)
    except DecodeError as error:
        raise ServiceError(f"the request is not a message of this call: {error}", reason="REQUEST_INVALID") from error


def _make_parser(details: grpc.HandlerCallDetails, handler: Any) -> Parse:
    """Return the function that parses a request of a method, unless it has too many fields."""

    def parse(data: bytes) -> Any:
        check_fields(data, str(details.method))
        return data if handler.request_deserializer is None else handler.request_deserializer(data)

    return parse


def check_role(rule: Rule, principal: Principal, method: str) -> None:
    """Refuse a caller whose role does not allow a call.

    Raises:
        ServiceError: reason ``PERMISSION_DENIED``.
    """
    if rule.roles and not principal.roles & rule.roles:
        raise denied_error(
            f"{principal.name} may not call {method.rpartition('/')[2]}",
            remedy=f"it takes the role {' or '.join(sorted(rule.roles))}",
        )
    if rule.every_project and not principal.may_see("*"):
        raise denied_error(f"{principal.name} is not of all projects", remedy="only an operator of all projects may")


async def _read_only_message(
    stream: AsyncIterator[bytes], room: Room, rule: Rule, *, keeping: contextlib.AsyncExitStack | None = None
) -> bytes:
    """Read the request of a call that has one.

    Raises:
        ServiceError: As :func:`next_message`, or ``REQUEST_INVALID`` without one.
    """
    data = await next_message(stream, room, seconds=rule.seconds, keeping=keeping)
    if data is None:
        raise ServiceError("the call has no request", reason="REQUEST_INVALID")
    return data


def check_project(principal: Principal, field: str, resource: str) -> None:
    """Refuse a resource of another project with the same error as for one that does not exist.

    ``projects/-`` is left to the call: to a list, it stands for all projects that the caller may see; no project has this name.

    Raises:
        ServiceError: reason ``EXPORT_NOT_FOUND``, ``PERMISSION_DENIED`` for a whole project, or ``REQUEST_INVALID``.
        ArtifactError: reason ``ARTIFACT_NOT_FOUND``.
    """
    parts = resource.split("/")
    if parts[0] != "projects" or len(parts) < 2 or not parts[1]:
        raise ServiceError(
            f"{field} is {resource!r}",
            reason="REQUEST_INVALID",
            remedy="it begins with projects/{project}",
            about={"field": field},
        )
    if principal.may_see(parts[1]) or (field, parts[1:]) == ("parent", ["-"]):  # of all that it may see
        return
    if field == "parent":
        raise denied_error(
            f"{principal.name} has no access to the project {parts[1]!r}", remedy="name one of your own projects"
        )
    if parts[2:3] == ["artifacts"]:
        raise no_artifact_error(parts[1], "/".join(parts[3:]))
    raise ServiceError(
        f"there is no export {resource}",
        reason="EXPORT_NOT_FOUND",
        remedy="slipway list shows the existing exports",
        about={"export": resource},
    )


def no_artifact_error(project: str, digest: str) -> ArtifactError:
    """Return the error for an artifact that is not the project's, whether or not another project has it."""
    return ArtifactError(
        f"the project {project} has no artifact {digest}",
        reason="ARTIFACT_NOT_FOUND",
        remedy="upload it with slipway push --coordinator",
        about={"digest": digest},
    )


def denied_error(what: str, *, remedy: str) -> ServiceError:
    """Return the refusal of a caller without the right to call."""
    return ServiceError(what, reason="PERMISSION_DENIED", remedy=remedy)


@contextlib.asynccontextmanager
async def _limit_time(what: str, seconds: float | None) -> AsyncIterator[None]:
    """End a block that takes too long.

    Raises:
        ServiceError: reason ``CALL_TIMEOUT``.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ServiceError(f"{what} than {seconds:g} s", reason="CALL_TIMEOUT", remedy="try again") from error


async def _abort(context: Context, error: ModelExportError) -> None:
    metrics.CALLS_REFUSED.add(reason=error.reason)
    if error.reason in {"UNAUTHENTICATED", "PERMISSION_DENIED", "LIMIT_EXCEEDED"}:
        log.info(f"refused a call from {host_of(context)}: {error.reason}: {error.message}")
    await abort(context, error.failure())
