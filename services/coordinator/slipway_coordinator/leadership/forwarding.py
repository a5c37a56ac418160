"""Forward a standby's connections to the active coordinator, byte for byte, so that TLS stays between client and coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from dataclasses import dataclass

from slipway.rpc.serving import check_port, listen_error

log = logging.getLogger("slipway.coordinator.forwarding")

_CONNECT_SECONDS = 2.0
_READ_BYTES = 1 << 18
_MOST_CONNECTIONS = 4096
_MOST_OF_A_HOST = 512

# Keepalive (idle seconds, seconds between probes, probes) towards the active coordinator, whose machine may be gone, and clients.
_KEEPALIVE_LEADER, _KEEPALIVE_CLIENT = (2, 1, 2), (30, 10, 3)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False, slots=True)
class _Connection:
    """A forwarded connection: the client's host (empty for a unix socket) and the leader it goes to."""

    host: str
    leader: str
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter

    def cut(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class Forwarder:
    """Listens at an address and forwards every connection to the active coordinator; resets connections without a leader.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        same_port: Whether to connect to the leader at this address' port instead of the port of the leader's address.

    Attributes:
        address: The same with the port that was bound.
        leader: ``HOST:PORT`` of the active coordinator; empty while unknown.
        reachable: Whether the leader accepted the last connection.
        left: Set when the leader ends a connection that its client had not ended.
    """

    def __init__(self, address: str, *, same_port: bool = False) -> None:
        self.address = address
        self._same_port = same_port
        self.leader = ""
        self.reachable = False
        self.left = asyncio.Event()
        self._problem = ""
        self._open: dict[_Connection, None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Accept connections from now on.

        Raises:
            ServiceError: reason ``REQUEST_INVALID`` when the address cannot be bound.
        """
        check_port(self.address)
        try:
            if self.address.startswith("unix:"):
                path = self.address.removeprefix("unix:")
                self._server = await asyncio.start_unix_server(self._take, path)
                return
            listener = listening_socket(self.address)
        except (OSError, ValueError) as error:
            raise listen_error(self.address, str(error)) from error
        self.address = f"{self.address.rpartition(':')[0]}:{listener.getsockname()[1]}"
        self._server = await asyncio.start_server(self._take, sock=listener)

    async def forward_to(self, leader: str) -> None:
        """Forward connections to a leader; cut those to another leader, so that their clients reconnect to this one.

        Tests a leader that is new or did not accept the last connection.
        """
        if leader and self._same_port:
            leader = f"{leader.rpartition(':')[0]}:{self.address.rpartition(':')[2]}"
        if leader != self.leader:
            self.leader, self.reachable = leader, False
            for connection in [one for one in self._open if one.leader != leader]:
                connection.cut()
        if leader and not self.reachable:
            with contextlib.suppress(OSError):
                _, writer = await self._connect(leader)
                writer.close()

    async def close(self) -> None:
        """Stop listening at once, and end all connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._open:
            connection.cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        leader = self.leader
        if not leader or len(self._open) >= _MOST_CONNECTIONS:
            _refuse(near)
            return
        try:
            far_reader, far = await self._connect(leader)
        except OSError:
            _refuse(near)
            return
        except BaseException:
            _refuse(near)
            raise
        connection = _Connection(_host(near), leader, near, far)
        self._make_room(connection.host)
        self._open[connection] = None
        _keep_alive(near, _KEEPALIVE_CLIENT)
        log.info(f"forwards {_name(near, 'peername')} to {leader} as {_name(far, 'sockname')}")
        try:
            if leader == self.leader:
                await self._pump_both((reader, near), (far_reader, far))
        finally:
            self._open.pop(connection, None)
            near.close()
            far.close()

    def _make_room(self, host: str) -> None:
        """Cut the oldest connection of a host that has reached its limit, so that it does not displace other hosts."""
        theirs = [one for one in self._open if one.host == host]
        if host and len(theirs) >= _MOST_OF_A_HOST:
            self._open.pop(theirs[0])
            theirs[0].cut()

    async def _pump_both(self, near: _Ends, far: _Ends) -> None:
        """Copy in both directions until the leader ends its side, or either end is gone."""
        there, back = (asyncio.create_task(_pump(*way)) for way in ((near[0], far[1]), (far[0], near[1])))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            if not there.done():
                self.left.set()
            elif there.result():  # the client has ended its side, but may still receive
                await back
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _connect(self, leader: str) -> _Ends:
        """Connect to a leader.

        Raises:
            OSError: The leader did not accept the connection in time.
        """
        host, _, port = leader.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_READ_BYTES)
        except (OSError, ValueError) as error:  # a malformed host or port raises ValueError
            self._note(leader, f"the active coordinator at {leader} cannot be reached: {error or 'no answer'}")
            raise OSError(f"{leader} cannot be reached") from error
        self._note(leader, "")
        _keep_alive(writer, _KEEPALIVE_LEADER)
        return reader, writer

    def _note(self, leader: str, problem: str) -> None:
        """Record whether the current leader accepts connections; log when that changes."""
        if leader != self.leader:
            return
        self.reachable = not problem
        if problem and problem != self._problem:
            log.warning(problem)
        self._problem = problem


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Copy data until the end; return whether the end was orderly."""
    try:
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        return False
    return True


def listening_socket(address: str) -> socket.socket:
    """Bind as gRPC does: ``[::]`` covers IPv4 and IPv6, and a port may be reused right after a connection ended.

    Raises:
        OSError: The address cannot be bound.
        ValueError: It is malformed.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host in {"", "::"} and socket.has_dualstack_ipv6():
        return socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(where[:2], family=family, backlog=128)


def _refuse(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, so that its client tries again: it would take an orderly end for a server that wants TLS."""
    plain = writer.get_extra_info("socket")
    if plain is not None and plain.family != socket.AF_UNIX:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


def _keep_alive(writer: asyncio.StreamWriter, times: tuple[int, int, int]) -> None:
    """Turn on TCP keepalive, to notice a peer that has vanished."""
    plain = writer.get_extra_info("socket")
    if plain is None or plain.family == socket.AF_UNIX:
        return
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), times, strict=True):
        plain.setsockopt(socket.IPPROTO_TCP, option, value)


def _host(writer: asyncio.StreamWriter) -> str:
    address = writer.get_extra_info("peername")
    return str(address[0]) if isinstance(address, tuple) else ""


def _name(writer: asyncio.StreamWriter, which: str) -> str:
    address = writer.get_extra_info(which)
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a unix socket"
