"""A client that starts many large requests and completes none; gRPC's own clients cannot do this, so it speaks HTTP/2 itself."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_WINDOW, _FRAME = 65535, 16384
_INITIAL_WINDOW_SIZE = 4


def bytes_taken(
    port: int,
    method: str,
    *,
    calls: int,
    announced: int,
    first: Sequence[bytes] = (),
    token: str = "",
    quiet: float = 1.0,
) -> int:
    """Begin some calls on one connection, and send as much of each one's message as the server has room for.

    Args:
        port: Of a server on loopback, without TLS.
        method: Full name of the method.
        calls: How many.
        announced: Length that every message is said to have; its last byte is never sent.
        first: Whole messages before it: one for each call, or none.
        token: Who calls; nobody known without one.
        quiet: Seconds after which a server that takes nothing more has taken all that it will.

    Returns:
        Bytes of the unfinished messages that the server has taken in, of calls that it has not ended.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        client = _Client(connection, announced - 1)
        for number in range(calls):
            client.call(2 * number + 1, method, token)
            before = b"".join(map(_message, first[number : number + 1]))
            client.unsent[2 * number + 1] = before + b"\0" + struct.pack(">I", announced)
        last = time.monotonic()
        while time.monotonic() - last < quiet:
            if client.send():
                last = time.monotonic()
                client.listen(seconds=0)
            else:
                client.listen(seconds=0.05)
        return client.taken


class _Client:
    def __init__(self, connection: socket.socket, most: int) -> None:
        self._connection, self._most, self._unread = connection, most, b""
        self._room = self._initial = _WINDOW
        self._windows: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self.unsent: dict[int, bytes] = {}  # before the content that is never whole
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0))

    def call(self, stream: int, method: str, token: str) -> None:
        headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "server")]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        headers += [("authorization", f"Bearer {token}")] if token else []
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
        self._write(_frame(HEADERS, _END_HEADERS, stream, block))
        self._windows[stream], self._sent[stream] = self._initial, 0

    @property
    def taken(self) -> int:
        """Content of the calls that are still open."""
        return sum(self._sent[stream] for stream in self._windows)

    def send(self) -> bool:
        """Send a frame of each call that has room for one; returns whether there was any."""
        moved = False
        for stream, window in list(self._windows.items()):
            before = self.unsent[stream]
            count = min(_FRAME, window, self._room, len(before) or self._most - self._sent[stream])
            if count <= 0:
                continue
            moved = True
            self._write(_frame(DATA, 0, stream, before[:count] or bytes(count)))
            self._room -= count
            self._windows[stream] -= count
            if before:
                self.unsent[stream] = before[count:]
            else:
                self._sent[stream] += count
        return moved

    def listen(self, *, seconds: float) -> None:
        """Read what the server says of its room, and which calls it has ended."""
        if not select.select([self._connection], [], [], seconds)[0]:
            return
        self._unread += self._connection.recv(1 << 20)
        while len(self._unread) >= 9:
            size, stream = int.from_bytes(self._unread[:3]), int.from_bytes(self._unread[5:9])
            kind, flags = self._unread[3:5]
            if len(self._unread) < 9 + size:
                return
            body, self._unread = self._unread[9 : 9 + size], self._unread[9 + size :]
            self._hear(kind, flags, stream, body)

    def _hear(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == WINDOW_UPDATE and stream:
            if stream in self._windows:
                self._windows[stream] += int.from_bytes(body)
        elif kind == WINDOW_UPDATE:
            self._room += int.from_bytes(body)
        elif kind == SETTINGS and not flags & _ACK:
            settings = dict(struct.iter_unpack(">HI", body))
            initial = settings.get(_INITIAL_WINDOW_SIZE, self._initial)
            self._windows = {each: window + initial - self._initial for each, window in self._windows.items()}
            self._initial = initial
            self._write(_frame(SETTINGS, _ACK, 0))
        elif kind == PING and not flags & _ACK:
            self._write(_frame(PING, _ACK, 0, body))
        elif kind == RESET or (kind == HEADERS and flags & _END_STREAM):
            self._windows.pop(stream, None)
        elif kind == GOAWAY:
            self._windows.clear()

    def _write(self, data: bytes) -> None:
        self._connection.sendall(data)


def _message(data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _text(text: str) -> bytes:
    """HPACK's form of a text, without Huffman's code."""
    data = text.encode()
    assert len(data) < 127 + 128
    return (bytes([len(data)]) if len(data) < 127 else bytes([127, len(data) - 127])) + data
