"""Connections of the port for HTTP, with a small application behind: their number, their handshake, and readers that are slow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from slipway.settings.security import TlsFiles
from slipway_coordinator.http import listener
from slipway_coordinator.http.application import HttpApplication
from slipway_coordinator.http.listener import HttpListener
from slipway_coordinator.http.requests import Receive, Scope, Send
from support.servers.certificates import Authority

CONTENT = b"0123456789abcdef" * (1 << 20)
"""More than the buffers of a connection on one machine hold."""
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class OneDocument:
    """Answers every request with the same content at once, without reading its body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(CONTENT)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": CONTENT})

    async def close(self) -> None:
        """Nothing is under way."""


@contextlib.asynccontextmanager
async def serving(tls: TlsFiles | None = None) -> AsyncIterator[int]:
    """Serve at a port."""
    served = HttpListener(cast("HttpApplication", OneDocument()), "127.0.0.1:0", tls)
    await served.start()
    try:
        yield served.port
    finally:
        async with asyncio.timeout(30):
            await served.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


def connected(port: int, authority: Authority | None = None) -> socket.socket:
    """Connect with little room for what is not read yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    if authority is None:
        return connection
    context = ssl.create_default_context(cafile=str(authority.ca))
    return context.wrap_socket(connection, server_hostname="localhost")


def read(connection: socket.socket, *, pause: float) -> bytes:
    """Read until the connection ends, with a pause after each part."""
    parts = list[bytes]()
    with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
        while part := connection.recv(1 << 15):
            parts.append(part)
            time.sleep(pause)
    return b"".join(parts)


def read_response(port: int, authority: Authority | None, *, pause: float) -> bytes:
    with connected(port, authority) as connection:
        connection.sendall(GET)
        return read(connection, pause=pause).partition(b"\r\n\r\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_slow_reader_gets_all_of_its_response(
    authority: Authority, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_HEADER_SECONDS", 0.3)
    files = authority.files("server", "localhost") if encrypted else None
    async with serving(files) as port:
        received = await asyncio.to_thread(read_response, port, authority if encrypted else None, pause=0.004)
    assert received == CONTENT


async def test_a_reader_that_is_too_slow_does_not_keep_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HEADER_SECONDS", 0.2)
    monkeypatch.setattr(listener, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(listener, "_BYTES_PER_SECOND", 1 << 30)
    async with serving() as port:
        received = await asyncio.to_thread(read_response, port, None, pause=0.01)
    assert len(received) < len(CONTENT)


async def test_a_second_request_does_not_keep_a_response_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_PATIENCE_SECONDS", 0.5)
    async with serving() as port:
        with connected(port) as connection:
            connection.sendall(GET + GET)
            await asyncio.sleep(2)
            assert len(await asyncio.to_thread(read, connection, pause=0)) < len(CONTENT)


async def test_connections_count_before_their_handshake(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MOST_OF_A_HOST", 3)
    async with serving(authority.files("server", "localhost")) as port:
        with contextlib.ExitStack() as closing:
            held = [closing.enter_context(connected(port)) for _ in range(5)]
            for connection in held[3:]:
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(connection.recv, 1) == b""
            held[0].settimeout(0.2)
            with pytest.raises(TimeoutError):
                held[0].recv(1)
            held[0].close()
            await asyncio.sleep(0.2)
            assert len(await asyncio.to_thread(_first_bytes, port, authority)) == 15
        # Stopping does not wait for those that are silent.


def _first_bytes(port: int, authority: Authority) -> bytes:
    with connected(port, authority) as connection:
        connection.sendall(GET)
        return connection.recv(15)


async def test_a_handshake_that_takes_long_ends(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_SECONDS", 0.3)
    async with serving(authority.files("server", "localhost")) as port:
        with connected(port) as silent:
            silent.sendall(b"\x16\x03\x01")
            began = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(silent.recv, 1) == b""
            assert time.monotonic() - began < 8
        assert await asyncio.to_thread(_first_bytes, port, authority) == b"HTTP/1.1 200 OK"


async def test_plain_text_to_a_port_with_certificates_is_not_read(authority: Authority) -> None:
    async with serving(authority.files("server", "localhost")) as port:
        with connected(port) as plain:
            plain.sendall(GET)
            assert b"HTTP" not in await asyncio.to_thread(read, plain, pause=0)


async def test_a_broken_body_after_the_response_ends_the_connection_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with serving() as port:
        with connected(port) as connection:
            connection.sendall(b"PUT / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            await asyncio.to_thread(connection.recv, 100)
            connection.sendall(b"zz\r\n")
            await asyncio.to_thread(read, connection, pause=0)
    assert not errors
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
