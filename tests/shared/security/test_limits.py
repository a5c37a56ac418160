"""A stream that nobody reads is let go; calls that hang are ended; counts are given back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from slipway.errors import ModelExportError
from slipway.rpc.call_ends import failure_of_call
from slipway.security.access.access_file import Everyone
from slipway.security.access.principals import OWNER
from slipway.security.access.rules import Rule
from slipway.security.interceptor import AccessInterceptor
from slipway.security.limits import Limits, OpenStreams

RULES = {"/t/Flood": Rule(OWNER.roles), "/t/Hang": Rule(OWNER.roles, seconds=0.2)}


class Server:
    """Two RPCs: one streams without an end, one never answers."""

    def __init__(self, *, write_seconds: float = 600.0) -> None:
        self.ended = asyncio.Event()
        limits = Limits(streams=1, write_seconds=write_seconds)
        self._server = grpc.aio.server(interceptors=[AccessInterceptor(Everyone(), rules=RULES, limits=limits)])
        handlers = {
            "Flood": grpc.unary_stream_rpc_method_handler(self._flood),
            "Hang": grpc.unary_unary_rpc_method_handler(self._hang),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def _flood(self, _request: bytes, _context: Any) -> Any:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            self.ended.set()

    async def _hang(self, _request: bytes, _context: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    async def __aenter__(self) -> grpc.aio.Channel:
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        return self._channel

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._server.stop(None)


async def read_to_its_end(call: Any) -> None:
    while await call.read():
        pass


async def test_a_stream_that_is_not_read_ends_and_frees_its_place() -> None:
    server = Server(write_seconds=0.3)
    async with server as channel:
        unread = channel.unary_stream("/t/Flood")(b"")
        await asyncio.wait_for(server.ended.wait(), 60)
        again = channel.unary_stream("/t/Flood")(b"")
        assert len(await again.read()) == 100_000  # the one place is free again
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_its_end(unread)
        failure = failure_of_call(caught.value, address="")
        assert (failure.reason, failure.retryable) == ("TRANSFER_SLOW", True)  # with which clients go on
        assert "0.3 s" in failure.message
        again.cancel()


def test_a_client_has_no_more_streams_than_it_may() -> None:
    async def run() -> str:
        async with Server() as channel:
            first = channel.unary_stream("/t/Flood")(b"")
            await first.read()
            second = channel.unary_stream("/t/Flood")(b"")
            try:
                await second.read()
            except grpc.aio.AioRpcError as error:
                first.cancel()
                return failure_of_call(error, address="").reason
        return ""

    assert asyncio.run(run()) == "LIMIT_EXCEEDED"


def test_a_call_that_hangs_is_ended_by_the_server() -> None:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with Server() as channel:
            try:
                await channel.unary_unary("/t/Hang")(b"")
            except grpc.aio.AioRpcError as error:
                return error.code(), failure_of_call(error, address="").reason
        raise AssertionError("it answered")

    assert asyncio.run(run()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "CALL_TIMEOUT")


def test_places_are_given_back_after_an_error() -> None:
    streams = OpenStreams(Limits(streams=1))
    for _ in range(2):
        with pytest.raises(KeyError), streams.one("a"):
            raise KeyError
    with streams.one("a"), streams.one("b"), pytest.raises(ModelExportError, match="a has 1 streams"), streams.one("a"):
        pass
