"""The responses of calls: one JSON document, server-sent events, or content."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from google.protobuf.message import Message
from google.rpc import status_pb2

from slipway.errors import ServiceError
from slipway.rpc.http_status import http_status
from slipway.rpc.values import failure_of_status
from slipway_coordinator.http.errors import error_headers
from slipway_coordinator.http.messages import json_of
from slipway_coordinator.http.requests import Send

_JSON = "application/json"
_FIRST_HEARTBEAT_SECONDS = 1.0
_HEARTBEAT_SECONDS = 15.0
"""Proxies end connections that are silent for a minute, often for less."""
_LAST_WORDS_SECONDS = 1.0
_CURSOR = "cursor"
_LARGE = 4 << 10
"""From this size on, a message is converted in a thread: that may take as long as a thousand small calls."""
_MOST_CHANGES = 100
"""Changes of exports that are kept as JSON: readers who are up to date want the same ones at the same time."""
_ALWAYS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Response(Protocol):
    """The response to one call.

    Attributes:
        begun: Whether its status has been sent, so that a later failure cannot change it.
    """

    begun: bool

    async def write(self, message: Message) -> None:
        """Send a response of a stream."""

    async def end(self, message: Message | None) -> None:
        """Send the only response, or the end of the stream."""

    async def fail(self, status: status_pb2.Status, *, http: int = 0) -> None:
        """Send what ended the call, under another HTTP status than its code's if one is given."""


async def send_document(
    send: Send, status: int, document: str | bytes, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response of JSON."""
    body = document.encode() if isinstance(document, str) else document
    about = {"content-type": _JSON, "content-length": str(len(body)), **_ALWAYS, **(headers or {})}
    await _begin(send, status, about)
    await send({"type": "http.response.body", "body": body})


async def send_status(
    send: Send, status: status_pb2.Status, *, http: int = 0, headers: Mapping[str, str] | None = None
) -> None:
    """Send a failure."""
    await send_document(
        send, http or http_status(status), json_of(status), {**error_headers(status), **(headers or {})}
    )


class Document:
    """The response of a call that has one: a JSON document."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def write(self, message: Message) -> None:
        """Refuse a second response: the call has one."""
        raise AssertionError(f"a second response, a {type(message).__name__}")

    async def end(self, message: Message | None) -> None:
        """Send the response."""
        assert message is not None
        document = await _converted(message)
        self.begun = True
        await send_document(self._send, 200, document)

    async def fail(self, status: status_pb2.Status, *, http: int = 0) -> None:
        """Send the failure."""
        await send_status(self._send, status, http=http)


class ConvertedChanges:
    """The newest changes of exports as JSON, each converted once for all who watch."""

    def __init__(self) -> None:
        self._made: dict[str, asyncio.Task[str]] = {}  # by the cursor, the oldest first

    async def of(self, cursor: str, message: Message) -> str:
        """Return the JSON of the change with a cursor."""
        made = self._made.get(cursor)
        if made is None or (made.done() and made.cancelled()):
            made = self._made[cursor] = asyncio.create_task(_converted(message))
            if len(self._made) > _MOST_CHANGES:
                del self._made[next(iter(self._made))]
        return await asyncio.shield(made)  # others wait for it, too


class Events:
    """The responses of a call as server-sent events: the id is the event's cursor or sequence, the name its kind, the data its JSON.

    Comments are sent while nothing happens. A failure after the begin is the event ``failure``: browsers have an event ``error`` of
    their own.

    Args:
        send: As ASGI gives it.
        resumed: Whether the client has seen events before.
        changes: Converts changes of exports for all such responses.
    """

    def __init__(self, send: Send, *, resumed: bool, changes: ConvertedChanges | None = None) -> None:
        self._send, self._resumed, self._changes = send, resumed, changes or ConvertedChanges()
        self._admitted = asyncio.Event()
        self._turn = asyncio.Lock()
        self._last = asyncio.get_running_loop().time()
        self.begun = False

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Send heartbeats while the block runs, from :meth:`admit` on: they begin the response, which no refusal can replace then."""
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def admit(self) -> None:
        """Begin the heartbeats."""
        self._admitted.set()

    async def write(self, message: Message) -> None:
        """Send an event."""
        event: Any = message
        kind = event.WhichOneof("event") or "message"
        data = await (self._changes.of(event.cursor, message) if kind == "change" else _converted(message))
        place = event.cursor if _CURSOR in message.DESCRIPTOR.fields_by_name else event.sequence
        await self._put(f"id: {place}\nevent: {kind}\ndata: {data}\n\n")

    async def end(self, message: Message | None) -> None:  # noqa: ARG002 - a stream has no response of its own
        """Send the end; to a client that has seen everything, the status at which browsers do not reconnect."""
        if self._resumed and not self.begun:
            self.begun = True
            await _begin(self._send, 204, _ALWAYS)
        else:
            await self._put("")
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, status: status_pb2.Status, *, http: int = 0) -> None:
        """Send the failure."""
        if not self.begun:
            await send_status(self._send, status, http=http)
            return
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            await self._put(f"event: failure\ndata: {json_of(status)}\n\n")
            await self._send({"type": "http.response.body", "body": b""})

    async def _beat(self) -> None:
        await self._admitted.wait()
        loop, pause = asyncio.get_running_loop(), _FIRST_HEARTBEAT_SECONDS
        while True:
            await asyncio.sleep(pause)
            silent = loop.time() - self._last
            if not self.begun or silent >= _HEARTBEAT_SECONDS:
                await self._put(": the stream goes on\n\n")
                silent = 0.0
            pause = _HEARTBEAT_SECONDS - silent

    async def _put(self, text: str) -> None:
        async with self._turn:
            if not self.begun:
                self.begun = True
                await _begin(
                    self._send, 200, {"content-type": "text/event-stream", "x-accel-buffering": "no", **_ALWAYS}
                )
            if text:
                await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            self._last = asyncio.get_running_loop().time()


class Content:
    """The responses of a call as bytes: all of a content, or a part of it.

    Args:
        send: As ASGI gives it.
        field: Field of each response that has the bytes.
        ranged: Whether a range was asked for.
        head: Whether only the headers are asked for.

    Attributes:
        offset: First byte that was asked for.
        limit: Largest number of bytes that was asked for; 0 for all.
        is_enough: Whether all that was asked for is sent, except for the end.
    """

    def __init__(self, send: Send, field: str, *, ranged: bool, head: bool) -> None:
        self._send, self._field, self._ranged, self._head = send, field, ranged, head
        self.offset = self.limit = 0
        self.begun = self.is_enough = False

    async def write(self, message: Message) -> None:
        """Send bytes; the first message has the size of the whole content.

        Raises:
            ServiceError: reason ``CANCELLED`` once the headers are sent, if no more is asked for.
        """
        if not self.begun:
            await self._start(int(getattr(message, "size_bytes")))  # noqa: B009 - of any message of content
            if self._head:
                self.is_enough = True
                raise ServiceError("only the headers were asked for", reason="CANCELLED")
        data = getattr(message, self._field)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, message: Message | None) -> None:  # noqa: ARG002 - a stream has no response of its own
        """Send the end."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, status: status_pb2.Status, *, http: int = 0) -> None:
        """Send the failure; a range beyond the end has a status of its own."""
        size = failure_of_status(status).about.get("size_bytes", "") if self._ranged else ""
        if size:
            await send_status(self._send, status, http=416, headers={"content-range": f"bytes */{size}"})
        else:
            await send_status(self._send, status, http=http)

    async def _start(self, size: int) -> None:
        self.begun = True
        headers = {"content-type": "application/octet-stream", **_ALWAYS}
        if self._ranged or not (
            self.offset or self.limit
        ):  # a range is of the whole, not of what a query has left of it
            headers["accept-ranges"] = "bytes"
        end = min(size, self.offset + self.limit) if self.limit else size
        headers["content-length"] = str(end - self.offset)
        if not self._ranged:
            await _begin(self._send, 200, headers)
        elif self.offset == size:
            await _begin(self._send, 416, {**headers, "content-range": f"bytes */{size}"})
        else:
            await _begin(self._send, 206, {**headers, "content-range": f"bytes {self.offset}-{end - 1}/{size}"})


async def _converted(message: Message) -> str:
    """Return a message as JSON; other calls go on while a large one is converted."""
    return await asyncio.to_thread(json_of, message) if message.ByteSize() > _LARGE else json_of(message)


async def _begin(send: Send, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
