"""Limits for every call, independent of its caller."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
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
        requests: Messages of one principal that are on their way in at a time, or large and being handled.
        all_requests: The same of all principals together, except workers' reports.
        reports: The same of workers' reports.
        unnamed_requests: The same of all callers without an identity.
        arrival_seconds: How long a message may take to arrive while another one waits for its place.
        write_seconds: How long a message of a stream may wait for its reader.
        recheck_seconds: How often the rights of a caller are checked again during a stream without end.
        items: Entries of a list or map in a request.
        labels: Labels and sources of an export.
        text_bytes: Length of a text in a request.
        name_bytes: Length of a name, a key or a page token.
    """

    streams: int = 256
    unnamed_streams: int = 64
    all_unnamed_streams: int = 1024
    requests: int = 8
    all_requests: int = 16
    reports: int = 8
    unnamed_requests: int = 8
    arrival_seconds: float = 5.0
    write_seconds: float = 60.0
    recheck_seconds: float = 30.0
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
        raise limit_error(f"the request has {len(request)} bytes, this call takes {max_bytes}", field="")


def _check(message: Message, limits: Limits, *, path: str) -> None:
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        items: Sequence[Any] = [value]
        if field.is_repeated:
            most = limits.labels if field.name in _FEW else limits.items
            if len(value) > most:
                raise limit_error(f"{name} has {len(value)} entries, {most} are allowed", field=name)
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
        raise limit_error(f"{name} has {size} bytes, {most} are allowed", field=name)
    if "\0" in text:  # PostgreSQL can neither store nor compare it
        raise ServiceError(
            f"{quoted(name)} has a NUL character",
            reason="REQUEST_INVALID",
            remedy="leave it out",
            about={"field": name},
        )


def limit_error(what: str, *, field: str) -> ServiceError:
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
        self._unnamed = Places(
            each=limits.unnamed_streams,
            together=limits.all_unnamed_streams,
            newer="opened newer streams without an identity",
        )

    @contextmanager
    def one(self, principal: str) -> Iterator[None]:
        """Count as one of a principal's streams while the block runs.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED``.
        """
        most = self._limits.streams
        if self._open[principal] >= most:
            raise limit_error(f"{principal} has {most} streams open already", field="")
        self._open[principal] += 1
        try:
            yield
        finally:
            self._open[principal] -= 1
            if not self._open[principal]:
                del self._open[principal]

    def unnamed(self, address: str) -> AbstractAsyncContextManager[None]:
        """Hold a stream of a caller without an identity."""
        return self._unnamed.one(address)


class Places:
    """Places of callers without an identity. When full, close the busiest address's oldest slot.

    A new one is never refused: a caller that fills the places of its address cannot keep out others from there.

    Args:
        each: How many one address may have.
        together: How many all may have.
        newer: What an address did to end its oldest place, for the message.
    """

    def __init__(self, *, each: int, together: int, newer: str) -> None:
        self._each, self._together, self._newer = each, together, newer
        self._held: dict[str, list[asyncio.Timeout]] = {}

    @asynccontextmanager
    async def one(self, address: str) -> AsyncIterator[None]:
        """Hold a place.

        Raises:
            ServiceError: reason ``LIMIT_EXCEEDED`` if this stream is ended.
        """
        try:
            async with asyncio.timeout(None) as place:
                self._held.setdefault(address, []).append(place)
                self._make_room(address)
                try:
                    yield
                finally:
                    self._forget(address, place)
        except TimeoutError as error:
            if not place.expired():
                raise
            raise limit_error(f"{address} {self._newer}", field="") from error

    def _make_room(self, address: str) -> None:
        if len(self._held[address]) > self._each:
            self._end_oldest(address)
        elif sum(map(len, self._held.values())) > self._together:
            self._end_oldest(max(self._held, key=lambda one: len(self._held[one])))

    def _end_oldest(self, address: str) -> None:
        oldest = self._held[address][0]
        self._forget(address, oldest)
        oldest.reschedule(0.0)  # as if its time were over

    def _forget(self, address: str, place: asyncio.Timeout) -> None:
        held = self._held.get(address, [])
        if place in held:
            held.remove(place)
        if not held:
            self._held.pop(address, None)
