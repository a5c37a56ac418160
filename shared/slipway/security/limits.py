"""Limits for every call, independent of its caller."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from slipway.errors import ServiceError
from slipway.texts import quoted, shortened


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one client.

    Attributes:
        streams: Open streams of one principal.
        unnamed_streams: Open streams of callers without an identity, from one address.
        all_unnamed_streams: The same, from all addresses.
        write_seconds: How long a message of a stream may wait for its reader.
        items: Entries of a list or map in a request.
        labels: Labels and sources of an export.
        text_bytes: Length of a text in a request.
        name_bytes: Length of a name, a key or a page token.
    """

    streams: int = 256
    unnamed_streams: int = 64
    all_unnamed_streams: int = 1024
    write_seconds: float = 60.0
    items: int = 256
    labels: int = 64
    text_bytes: int = 4096
    name_bytes: int = 256


_NAMES = frozenset({"name", "parent", "export_id", "page_token", "request_id", "etag", "stage", "service", "key"})
_FEW = frozenset({"labels", "sources", "inputs"})


def check_request(request: Any, limits: Limits) -> None:
    """Refuse texts and lists that exceed the limits, and texts that the database cannot store.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED`` or ``REQUEST_INVALID``, naming the field.
    """
    if isinstance(request, Message):
        _check(request, limits, path="")


def check_size(request: bytes, max_bytes: int) -> None:
    """Refuse a request that is larger than its RPC allows.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED``.
    """
    if len(request) > max_bytes:
        raise exceeded(f"the request has {len(request)} bytes, this call takes {max_bytes}", field="")


def _check(message: Message, limits: Limits, *, path: str) -> None:
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        items: Sequence[Any] = [value]
        if field.is_repeated:
            most = limits.labels if field.name in _FEW else limits.items
            if len(value) > most:
                raise exceeded(f"{name} has {len(value)} entries, {most} are allowed", field=name)
            items = _entries(field, value)
        for item in items:
            if isinstance(item, str):
                _check_text(item, limits.name_bytes if field.name in _NAMES else limits.text_bytes, name=name)
            elif isinstance(item, Message):
                _check(item, limits, path=f"{name}.")
            elif isinstance(item, tuple):
                _check_text(item[0], limits.name_bytes, name=f"{name} key")
                _check_text(item[1], limits.text_bytes, name=f"{name}[{shortened(item[0])}]")


def _entries(field: FieldDescriptor, value: Any) -> Sequence[Any]:
    """Return the items of a list, the values of a map, or the pairs of a map of texts."""
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return list(value)
    of = field.message_type.fields_by_name["value"]
    if of.type == FieldDescriptor.TYPE_STRING:
        return list(value.items())
    return list(value.values())


def _check_text(text: str, most: int, *, name: str) -> None:
    size = len(text.encode())
    if size > most:
        raise exceeded(f"{name} has {size} bytes, {most} are allowed", field=name)
    if "\0" in text:  # PostgreSQL can neither store nor compare it
        raise ServiceError(
            f"{quoted(name)} has a NUL character",
            reason="REQUEST_INVALID",
            remedy="leave it out",
            about={"field": name},
        )


def exceeded(what: str, *, field: str) -> ServiceError:
    """Return the refusal of a request that exceeds a limit."""
    about = {"field": field} if field else None
    return ServiceError(what, reason="LIMIT_EXCEEDED", remedy="send less", about=about)


class OpenStreams:
    """Counts the open streams of each principal and, separately, those of callers without an identity.

    All methods run on one event loop.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._unnamed: dict[str, list[asyncio.Timeout]] = {}

    @contextmanager
    def one(self, principal: str) -> Iterator[None]:
        """Count as one of a principal's streams while the block runs.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED``.
        """
        most = self._limits.streams
        if self._open[principal] >= most:
            raise exceeded(f"{principal} has {most} streams open already", field="")
        self._open[principal] += 1
        try:
            yield
        finally:
            self._open[principal] -= 1
            if not self._open[principal]:
                del self._open[principal]

    @asynccontextmanager
    async def unnamed(self, address: str) -> AsyncIterator[None]:
        """Count as a stream of an anonymous caller while the block runs. Over the limit, end the oldest of the busiest address.

        A new stream is never refused, so one caller cannot lock out others at the same address.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED`` if this stream is ended.
        """
        try:
            async with asyncio.timeout(None) as stream:
                self._unnamed.setdefault(address, []).append(stream)
                self._make_room(address)
                try:
                    yield
                finally:
                    self._forget(address, stream)
        except TimeoutError as error:
            if not stream.expired():
                raise
            raise exceeded(f"{address} opened newer streams without an identity", field="") from error

    def _make_room(self, address: str) -> None:
        own, limits = self._unnamed[address], self._limits
        if len(own) > limits.unnamed_streams:
            self._end_oldest(address)
        elif sum(map(len, self._unnamed.values())) > limits.all_unnamed_streams:
            self._end_oldest(max(self._unnamed, key=lambda one: len(self._unnamed[one])))

    def _end_oldest(self, address: str) -> None:
        oldest = self._unnamed[address][0]
        self._forget(address, oldest)
        oldest.reschedule(0.0)  # as if its time were over

    def _forget(self, address: str, stream: asyncio.Timeout) -> None:
        streams = self._unnamed.get(address, [])
        if stream in streams:
            streams.remove(stream)
        if not streams:
            self._unnamed.pop(address, None)
