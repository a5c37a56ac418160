"""The responses of calls: one JSON document, server-sent events, or content."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2

from slipway_coordinator.http.errors import error_headers, http_status
from slipway_coordinator.http.messages import json_of
from slipway_coordinator.http.requests import Send

_JSON = "application/json"
_FIRST_HEARTBEAT_SECONDS = 1.0
_HEARTBEAT_SECONDS = 15.0
"""Proxies end connections that are silent for a minute, often for less."""
_LAST_WORDS_SECONDS = 1.0
_LARGE = 64 << 10
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

    async def fail(self, status: status_pb2.Status) -> None:
        """Send what ended the call."""


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
        """Never called: the call has one response."""
        raise NotImplementedError

    async def end(self, message: Message | None) -> None:
        """Send the response."""
        assert message is not None
        large = message.ByteSize() > _LARGE  # other calls go on while it is converted
        document = await asyncio.to_thread(json_of, message) if large else json_of(message)
        self.begun = True
        await send_document(self._send, 200, document)

    async def fail(self, status: status_pb2.Status) -> None:
        """Send the failure."""
        await send_status(self._send, status)


class Events:
    """The responses of a call as server-sent events: the id is the event's ``sequence``, the name its kind, the data its JSON.

    Comments are sent while nothing happens. A failure after the begin is the event ``error``.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._last = asyncio.get_running_loop().time()
        self.begun = False

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Send heartbeats while the block runs."""
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def write(self, message: Message) -> None:
        """Send an event."""
        event: Any = message
        large = message.ByteSize() > _LARGE
        data = await asyncio.to_thread(json_of, message) if large else json_of(message)
        kind = event.WhichOneof("event") or "message"
        await self._put(f"id: {event.sequence}\nevent: {kind}\ndata: {data}\n\n")

    async def end(self, message: Message | None) -> None:  # noqa: ARG002 - a stream has no response of its own
        """Send the end."""
        await self._put("")
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, status: status_pb2.Status) -> None:
        """Send the failure."""
        if not self.begun:
            await send_status(self._send, status)
            return
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            await self._put(f"event: error\ndata: {json_of(status)}\n\n")
            await self._send({"type": "http.response.body", "body": b""})

    async def _beat(self) -> None:
        loop, pause = asyncio.get_running_loop(), _FIRST_HEARTBEAT_SECONDS
        while True:
            await asyncio.sleep(pause)
            silent = loop.time() - self._last
            if not self.begun or silent >= _HEARTBEAT_SECONDS:
                await self._put(": the export goes on\n\n")
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
    """The responses of a call as bytes: all of a content, or its end from an offset.

    Args:
        send: As ASGI gives it.
        field: Field of each response that has the bytes.
        ranged: Whether a range was asked for.

    Attributes:
        offset: First byte that was asked for.
    """

    def __init__(self, send: Send, field: str, *, ranged: bool) -> None:
        self._send, self._field, self._ranged = send, field, ranged
        self.offset = 0
        self.begun = False

    async def write(self, message: Message) -> None:
        """Send bytes; the first message has the size of the whole content."""
        if not self.begun:
            await self._start(int(getattr(message, "size_bytes")))  # noqa: B009 - of any message of content
        data = getattr(message, self._field)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, message: Message | None) -> None:  # noqa: ARG002 - a stream has no response of its own
        """Send the end."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, status: status_pb2.Status) -> None:
        """Send the failure; a range beyond the end has a status of its own."""
        beyond = self._ranged and status.code == code_pb2.INVALID_ARGUMENT
        await send_status(self._send, status, http=416 if beyond else 0)

    async def _start(self, size: int) -> None:
        self.begun = True
        headers = {"content-type": "application/octet-stream", "accept-ranges": "bytes", **_ALWAYS}
        headers["content-length"] = str(size - self.offset)
        if not self._ranged:
            await _begin(self._send, 200, headers)
        elif self.offset == size:
            await _begin(self._send, 416, {**headers, "content-range": f"bytes */{size}"})
        else:
            await _begin(self._send, 206, {**headers, "content-range": f"bytes {self.offset}-{size - 1}/{size}"})


async def _begin(send: Send, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
