"""Limits that hold for every call, whoever makes it."""

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
    """What one client may use.

    Attributes:
        streams: Streams that one principal has open at a time.
        unnamed_streams: Streams that callers without an identity have open at a time, from one address.
        all_unnamed_streams: The same, from all addresses.
        write_seconds: How long one message of a stream may wait for a reader that does not read.
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
    """Refuse texts and lists that are longer than anything sensible, and texts that no database takes.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED`` or ``REQUEST_INVALID``, naming the field.
    """
    if isinstance(request, Message):
        _check(request, limits, path="")


def check_size(request: bytes, max_bytes: int) -> None:
    """Refuse a request that is larger than its RPC takes.

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
    """Items of a list; of a map from texts, its values or, when they are texts too, pairs."""
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
    if "\0" in text:  # PostgreSQL has no way to store it, or to compare with it
        raise ServiceError(
            f"{quoted(name)} has a NUL character",
            reason="REQUEST_INVALID",
            remedy="leave it out",
            about={"field": name},
        )


def exceeded(what: str, *, field: str) -> ServiceError:
    """Return the refusal of what is over a limit."""
    about = {"field": field} if field else None
    return ServiceError(what, reason="LIMIT_EXCEEDED", remedy="ask for less", about=about)


class OpenStreams:
    """Counts the streams that each principal has open, and apart from them those of callers without an identity.

    All methods run on one event loop.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._unnamed: dict[str, list[asyncio.Timeout]] = {}

    @contextmanager
    def one(self, principal: str) -> Iterator[None]:
        """Hold one of a principal's streams.

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
        """Hold a stream of a caller without an identity. Where there are too many, the oldest of the address that has most ends.

        A new one is never refused: whoever fills the room from an address cannot keep the others there out.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED``, when this one has to end.
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
