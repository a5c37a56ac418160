"""One HTTP request: its headers, its body, and whether its client is still there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from slipway.errors import ServiceError
from slipway.security.limits import limit_error
from slipway.texts import number_of
from slipway_coordinator.http.errors import HttpError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LARGEST = 1 << 62
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


class HttpRequest:
    """An HTTP request.

    Args:
        scope: As ASGI gives it; ``state`` has ``certificate_names`` of the connection.
        receive: As ASGI gives it.

    Attributes:
        is_too_large: Whether :meth:`body` has refused its body.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.verb: str = scope["method"]
        self.path: str = scope["raw_path"].decode("ascii")
        self.query: bytes = scope["query_string"]
        self.headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self.client: tuple[str, int] = tuple(scope["client"] or ("", 0))
        self.encrypted: bool = scope["scheme"] == "https"
        self.certificate_names: Sequence[str] = scope["state"].get("certificate_names", ())
        self.is_too_large = False
        self._receive = receive
        self._read = asyncio.Event()

    def header(self, name: str) -> str:
        """Return a header; the first of several, empty without one."""
        key = name.encode()
        return next((value.decode("latin-1") for header, value in self.headers if header == key), "")

    @property
    def content_length(self) -> int | None:
        """Bytes of the body, if the client says so."""
        return number_of(self.header("content-length"), most=_LARGEST)

    @property
    def has_body(self) -> bool:
        """Whether the client says that there is a body."""
        return bool(self.content_length) or bool(self.header("transfer-encoding"))

    @property
    def range(self) -> tuple[int, int] | None:
        """First byte and number of bytes (0: all from there) that ``Range`` asks for; None for everything, and for ranges of other forms.

        Nothing that is sent has a validator, so ``If-Range`` never holds.
        """
        match = None if self.header("if-range") else _RANGE.fullmatch(self.header("range"))
        if match is None:
            return None
        first, last = int(match[1]), match[2]
        if last is None:
            return first, 0
        return (first, int(last) - first + 1) if int(last) >= first else None

    def check_json(self) -> None:
        """Refuse a body of another type: a page of another site can send those without asking.

        Raises:
            HttpError: It is not JSON.
        """
        kind = self.header("content-type").partition(";")[0].strip().lower()
        if kind != "application/json":
            error = ServiceError(
                "the body's Content-Type is not application/json",
                reason="REQUEST_INVALID",
                remedy="send JSON, and say so",
            )
            raise HttpError(error, 415)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive.

        Raises:
            ServiceError: reason ``CANCELLED`` if the client leaves before its end.
        """
        while not self._read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ServiceError("the client has left", reason="CANCELLED")
            if not message.get("more_body", False):
                self._read.set()
            if message.get("body"):
                yield message["body"]

    async def body(self, *, most: int) -> bytes:
        """Return the whole body.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED`` if it is larger than ``most``.
        """
        if (self.content_length or 0) > most:
            raise self._too_large_error(most)
        data = bytearray()
        async for chunk in self.chunks():
            data += chunk
            if len(data) > most:
                raise self._too_large_error(most)
        return bytes(data)

    def _too_large_error(self, most: int) -> ServiceError:
        self.is_too_large = True
        return limit_error(f"the body has more than {most} bytes", field="")

    async def wait_for_disconnect(self) -> None:
        """Return when the client has left after the end of its body; whoever reads the body learns of it before."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
