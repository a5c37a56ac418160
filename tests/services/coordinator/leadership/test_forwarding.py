"""Connections that a standby passes on, over real sockets: whole, both ways, to one leader at a time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from slipway.errors import ServiceError
from slipway.rpc.serving import SERVER_OPTIONS, listen
from slipway_coordinator.leadership import forwarding
from slipway_coordinator.leadership.forwarding import Forwarder
from slipway_coordinator.leadership.standby import advertised_address
from slipway_coordinator.service import coordinator_parser
from support.harness.unhurried import unhurried
from support.servers.free_ports import free_port

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Leader:
    """A server that says its name, repeats what it is told until there is no more, then says how much it was."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for writer in self.writers:
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(OSError):
            writer.write(f"{self.name}\n".encode())
            count = 0
            while data := await reader.read(1 << 16):
                count += len(data)
                writer.write(data)
                await writer.drain()
            writer.write(f"\n{count}".encode())
            writer.close()


async def connect(forwarder: Forwarder) -> Ends:
    return await asyncio.open_connection("127.0.0.1", int(forwarder.address.rpartition(":")[2]))


async def first_byte(forwarder: Forwarder) -> bytes:
    reader, writer = await connect(forwarder)
    try:
        return await reader.read(1)
    finally:
        writer.close()


def run(test: Callable[[Forwarder], Awaitable[None]], address: str = "127.0.0.1:0") -> None:
    async def running() -> None:
        forwarder = Forwarder(address)
        await forwarder.listen()
        try:
            await asyncio.wait_for(test(forwarder), 60)
        finally:
            await forwarder.close()

    asyncio.run(running())


async def ended(reader: asyncio.StreamReader) -> None:
    """Read to the end, however it comes."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass


def test_everything_goes_through_both_ways_and_to_the_last_byte() -> None:
    sent = bytes(range(256)) * 40_000  # more than all buffers on the way

    async def test(forwarder: Forwarder) -> None:
        async with Leader("a").serving() as leader:
            await forwarder.forward_to(leader)
            reader, writer = await connect(forwarder)

            async def send() -> None:
                writer.write(sent)
                await writer.drain()
                writer.write_eof()

            sending = asyncio.create_task(send())
            received = await reader.read(-1)
            await sending
            assert received == b"a\n" + sent + f"\n{len(sent)}".encode()
            writer.close()

    run(test)


def test_without_a_leader_a_connection_is_reset_at_once() -> None:
    async def test(forwarder: Forwarder) -> None:
        for leader in ("", f"127.0.0.1:{free_port()}"):
            await forwarder.forward_to(leader)
            began = time.monotonic()
            with pytest.raises(ConnectionResetError):
                await first_byte(forwarder)
            assert time.monotonic() - began < unhurried(1)
            assert not forwarder.reachable

    run(test)


def test_connections_to_a_former_leader_end_and_new_ones_go_to_the_new_one() -> None:
    async def test(forwarder: Forwarder) -> None:
        async with Leader("a").serving() as first, Leader("b").serving() as second:
            await forwarder.forward_to(first)
            reader, writer = await connect(forwarder)
            assert await reader.readline() == b"a\n"
            await forwarder.forward_to(first)
            writer.write(b"still here\n")
            assert await reader.readline() == b"still here\n"
            await forwarder.forward_to(second)
            await ended(reader)
            again, writer_again = await connect(forwarder)
            assert await again.readline() == b"b\n"
            assert not forwarder.left.is_set()
            writer.close()
            writer_again.close()

    run(test)


def test_a_leader_that_ends_ends_the_connection_and_a_client_that_ends_alarms_nobody() -> None:
    async def test(forwarder: Forwarder) -> None:
        one = Leader("a")
        async with one.serving() as leader:
            await forwarder.forward_to(leader)
            reader, writer = await connect(forwarder)
            await reader.readline()
            writer.close()
            reader, writer = await connect(forwarder)
            await reader.readline()
            assert not forwarder.left.is_set()
            one.writers[-1].transport.abort()
            await ended(reader)
            assert forwarder.left.is_set()
            writer.close()

    run(test)


def test_a_server_takes_the_address_over_while_connections_are_passed_on() -> None:
    async def test(forwarder: Forwarder) -> None:
        async with Leader("a").serving() as leader:
            await forwarder.forward_to(leader)
            reader, writer = await connect(forwarder)
            await reader.readline()
            await forwarder.close()
            server = grpc.aio.server(options=SERVER_OPTIONS)
            assert listen(server, forwarder.address) == int(forwarder.address.rpartition(":")[2])
            await server.start()
            await ended(reader)
            writer.close()
            _, writer = await connect(forwarder)
            writer.close()
            await server.stop(None)

    run(test)


def test_an_address_of_all_families_is_one_of_all_families() -> None:
    async def test(forwarder: Forwarder) -> None:
        async with Leader("a").serving() as leader:
            await forwarder.forward_to(leader)
            reader, writer = await connect(forwarder)
            assert await reader.readline() == b"a\n"
            writer.close()

    run(test, "[::]:0" if socket.has_dualstack_ipv6() else "0.0.0.0:0")
    run(test, "0.0.0.0:0")


def test_a_socket_of_this_machine_is_passed_on_too(tmp_path: Path) -> None:
    async def test(forwarder: Forwarder) -> None:
        async with Leader("a").serving() as leader:
            await forwarder.forward_to(leader)
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            assert await reader.readline() == b"a\n"
            writer.close()

    run(test, f"unix:{tmp_path / 's'}")


def test_a_connection_that_waits_for_the_leader_ends_with_the_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(forwarder: Forwarder) -> None:
        waiting = asyncio.Event()

        async def connects(_leader: str) -> Ends:
            waiting.set()
            return await asyncio.Future()

        forwarder.leader = "127.0.0.1:1"
        monkeypatch.setattr(forwarder, "_connect", connects)
        reader, writer = await connect(forwarder)
        await waiting.wait()
        await forwarder.close()
        await asyncio.wait_for(ended(reader), 20)
        writer.close()

    run(test)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_name_that_no_address_can_have_ends_no_standby(host: str) -> None:
    async def test(forwarder: Forwarder) -> None:
        await forwarder.forward_to(f"{host}:7070")
        assert not forwarder.reachable
        with pytest.raises(ConnectionResetError):
            await first_byte(forwarder)

    run(test)
    with pytest.raises(SystemExit):
        coordinator_parser("slipway coordinator").parse_args(["--state", "s", "--advertise", f"{host}:7070"])


@pytest.mark.parametrize("address", ["a.b:7070", "[fd00::7]:7070", "10.0.0.1:7070", "kö.example:1"])
def test_an_address_to_advertise_is_taken(address: str) -> None:
    given = coordinator_parser("slipway coordinator").parse_args(["--state", "s", "--advertise", address])
    assert given.advertise == address


def test_a_host_with_very_many_connections_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_MOST_OF_A_HOST", 2)

    async def test(forwarder: Forwarder) -> None:
        async with Leader("a").serving() as leader:
            await forwarder.forward_to(leader)
            opened = []
            for _ in range(3):
                opened.append(await connect(forwarder))
                assert await opened[-1][0].readline() == b"a\n"
            await asyncio.wait_for(ended(opened[0][0]), 20)
            for reader, writer in opened[1:]:
                writer.write(b"still here\n")
                assert await reader.readline() == b"still here\n"
            for _, writer in opened:
                writer.close()

    run(test)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "192.0.2.1:0", "127.0.0.1:x"])
def test_an_address_that_cannot_be_bound_is_refused(address: str) -> None:
    with pytest.raises(ServiceError, match="cannot listen") as caught:
        asyncio.run(Forwarder(address).listen())
    assert caught.value.reason == "REQUEST_INVALID"


@pytest.mark.parametrize(
    ("given", "address", "near", "found"),
    [
        ("10.0.0.1:7070", "0.0.0.0:7070", "10.9.9.9", "10.0.0.1:7070"),
        ("", "127.0.0.1:7070", "10.9.9.9", "127.0.0.1:7070"),
        ("", "0.0.0.0:7070", "10.9.9.9", "10.9.9.9:7070"),
        ("", "[::]:7070", "fd00::7", "[fd00::7]:7070"),
        ("", "0.0.0.0:7070", "127.0.0.1", ""),
        ("", "[::]:7070", "::1", ""),
        ("", "0.0.0.0:7070", "", ""),
        ("", "unix:/run/s", "10.9.9.9", ""),
    ],
)
def test_where_standbys_find_the_active_one(given: str, address: str, near: str, found: str) -> None:
    assert advertised_address(given, address=address, near_database=near) == found
