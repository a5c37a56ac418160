"""Calls refused before they reach a service are counted by Slipway's reasons, never by texts of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from slipway.observability import metrics
from slipway.rpc.call_ends import failure_of_call
from slipway.security.access.principals import OWNER, Principal
from slipway.security.access.projects import ALIKE, Projects
from slipway.security.access.refusals import unauthenticated_error
from slipway.security.access.rules import Rule
from slipway.security.interceptor import AccessInterceptor
from slipway.security.limits import Limits
from slipway_coordinator.api.starting import Gate
from support.servers.metrics_page import page

METHOD = "/slipway.v1.Test/Call"
STREAM = "/slipway.v1.Test/Stream"


class Named:
    """Identifies callers by their token alone."""

    async def identify(self, *, token: str, certificate_names: Sequence[str]) -> Principal:
        match token:
            case "owner":
                return OWNER
            case "nobody":
                return Principal("nobody", frozenset())
        raise unauthenticated_error(f"{token} is unknown")

    def projects(self) -> Projects:
        return ALIKE


async def _call(_request: bytes, _context: Any) -> bytes:
    return b"done"


async def _stream(_request: bytes, _context: Any) -> Any:
    yield b"first"
    await asyncio.sleep(3600)


class Refusals:
    """A server with its checks and a gate; :meth:`reason` tells why a call was refused."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.gate.is_open = True
        rules = {METHOD: Rule(OWNER.roles, max_bytes=10), STREAM: Rule(OWNER.roles)}
        checks = AccessInterceptor(Named(), rules=rules, limits=Limits(streams=1))
        self._server = grpc.aio.server(interceptors=[checks, self.gate])
        handlers = {
            "Call": grpc.unary_unary_rpc_method_handler(_call),
            "Stream": grpc.unary_stream_rpc_method_handler(_stream),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("slipway.v1.Test", handlers),))
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> Refusals:
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._server.stop(None)

    async def reason(self, token: str, request: bytes = b"", *, method: str = METHOD) -> str:
        try:
            await self._channel.unary_unary(method)(request, metadata=_as(token), timeout=60)
        except grpc.aio.AioRpcError as error:
            return failure_of_call(error, address="").reason
        return ""

    def stream(self, token: str) -> Any:
        return self._channel.unary_stream(STREAM)(b"", metadata=_as(token), timeout=60)


def _as(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def _refused() -> list[str]:
    async with Refusals() as server:
        reasons = [await server.reason(token) for token in ("owner", "a", "b", "c", "nobody")]
        reasons.append(await server.reason("owner", b"more than ten bytes"))
        held = server.stream("owner")
        assert await held.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stream("owner").read()
        reasons.append(failure_of_call(caught.value, address="").reason)
        held.cancel()
        server.gate.is_open = False
        reasons.append(await server.reason("owner"))
    return reasons


async def test_a_call_that_an_older_service_does_not_know_is_refused_by_name() -> None:
    async with Refusals() as server:
        assert await server.reason("owner", method="/slipway.v1.Test/CallOfALaterVersion") == "CALL_NOT_FOUND"


def test_what_is_refused_before_a_service_is_counted_by_its_reason() -> None:
    with metrics.serving("127.0.0.1:0") as port:
        reasons = asyncio.run(_refused())
        counted = {
            labels: value for (name, labels), value in page(port).items() if name == "slipway_calls_refused_total"
        }
    assert reasons == [
        "",
        *3 * ["UNAUTHENTICATED"],
        "PERMISSION_DENIED",
        *2 * ["LIMIT_EXCEEDED"],
        "COORDINATOR_UNAVAILABLE",
    ]
    assert counted == {(("reason", reason),): reasons.count(reason) for reason in set(reasons) - {""}}


async def test_a_message_that_grpc_itself_refuses_is_over_a_limit() -> None:
    async with Refusals() as server:
        assert await server.reason("owner", bytes(5 << 20)) == "LIMIT_EXCEEDED"
