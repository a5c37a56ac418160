"""Limit the requests that a server receives at a time, and their fields, so that it always has the memory for them.

gRPC keeps the received part of a message until all of it has arrived. A client that begins many large messages and ends none would
fill any memory, so the server requests a message only when it has a place for it; until then it waits at the client. A large message
keeps its place while its call is handled. Workers' reports have places of their own, so that clients never delay leases.

Parsing makes an object of a hundred bytes of a list entry of two, so fields are counted before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from slipway.errors import ServiceError
from slipway.rpc.values import RETRY_AFTER
from slipway.security.limits import Limits, Places, limit_error
from slipway.security.turns import Turns

Room = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
"""Opens the place of one message."""

_SMALL_MESSAGE = 64 << 10
_RETRY_SECONDS = "1"

MOST_FIELDS = 200_000
"""Most fields of a request, with those of its parts: facts of a stage of 256 KiB may have 130,000."""
SMALL_BYTES = 1 << 20
"""Up to this size, parsing takes less time than the count."""
_VARINT, _DELIMITED, _FIXED = 0, 2, {1: 8, 5: 4}  # kinds of fields, the last with their sizes


class Incoming:
    """The places of messages. All methods run on one event loop."""

    def __init__(self, limits: Limits) -> None:
        seconds = limits.arrival_seconds
        self._clients = Patient(limits.all_requests, each=limits.requests, seconds=seconds)
        self._workers = Patient(limits.reports, each=limits.reports, seconds=seconds)
        self._unnamed = Places(
            each=limits.unnamed_requests,
            together=limits.unnamed_requests,
            newer="has newer requests without an identity that have not arrived",
        )

    def of_client(self, name: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the place of a principal's message; further ones wait."""
        return self._clients.one(name)

    def of_worker(self, name: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the place of a worker's report; further ones wait."""
        return self._workers.one(name)

    def unnamed(self, address: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the place for callers without an identity; if all are taken, the oldest call ends."""
        return self._unnamed.one(address)


class Patient:
    """Places given in fair turns to principals. A message that takes long ends once another one has waited as long.

    Args:
        together: Number of places.
        each: Most places of one principal.
        seconds: How long a message may take, and another one wait, before the oldest of the principal with most places ends.
    """

    def __init__(self, together: int, *, each: int, seconds: float) -> None:
        self._turns = Turns(together, each=each)
        self._seconds = seconds
        self._held: dict[str, dict[asyncio.Timeout, float]] = {}  # by principal, the oldest first, with its begin

    @contextlib.asynccontextmanager
    async def one(self, name: str) -> AsyncIterator[None]:
        """Wait for a place and hold it within the block.

        Raises:
            ServiceError: reason ``REQUESTS_FULL`` if it was ended for another one.
        """
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(self._end_slow_ones(name))
        try:
            async with self._turns.one(name, project=name):
                waiting.cancel()
                async with asyncio.timeout(None) as place:
                    self._held.setdefault(name, {})[place] = loop.time()
                    try:
                        yield
                    finally:
                        self._forget(name, place)
        except TimeoutError as error:
            if not place.expired():
                raise
            raise ServiceError(
                f"the request of {name} took longer than {self._seconds:g} s while others waited",
                reason="REQUESTS_FULL",
                remedy="try again, with fewer requests at a time",
                about={RETRY_AFTER: _RETRY_SECONDS},
            ) from error
        finally:
            waiting.cancel()

    async def _end_slow_ones(self, name: str) -> None:
        """End slow messages, one after the other, until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            # While places are free, a principal waits for its own messages only.
            whose = name if self._turns.free else max(self._held, key=lambda one: len(self._held[one]), default=name)
            oldest, began = next(iter(self._held.get(whose, {}).items()), (None, 0.0))
            if oldest is not None and asyncio.get_running_loop().time() - began >= self._seconds:
                self._forget(whose, oldest)
                oldest.reschedule(0.0)  # as if its time were over

    def _forget(self, name: str, place: asyncio.Timeout) -> None:
        held = self._held.get(name, {})
        held.pop(place, None)
        if not held:
            self._held.pop(name, None)


async def next_message(
    stream: AsyncIterator[bytes], room: Room, *, seconds: float, keeping: contextlib.AsyncExitStack | None = None
) -> bytes | None:
    """Wait for a place, then for a stream's next message; None after the last one.

    Args:
        stream: The messages.
        room: Opens the place.
        seconds: Longest wait for both.
        keeping: Keeps the place of a large message until it is closed.

    Raises:
        ServiceError: reason ``CALL_TIMEOUT`` or ``REQUESTS_FULL``.
    """
    try:
        async with asyncio.timeout(seconds) as waiting, contextlib.AsyncExitStack() as place:
            await place.enter_async_context(room())
            data = await anext(aiter(stream), None)
            if keeping is not None and data is not None and len(data) > _SMALL_MESSAGE:
                keeping.push_async_exit(place.pop_all())
            return data
    except TimeoutError as error:
        if not waiting.expired():
            raise
        raise ServiceError(
            f"the next message took longer than {seconds:g} s", reason="CALL_TIMEOUT", remedy="try again"
        ) from error


def check_fields(data: bytes, method: str) -> None:
    """Refuse a request of more fields than any real one has.

    Args:
        data: The request.
        method: Full name of its RPC; one that is not described in this process is not counted.

    Raises:
        ServiceError: reason ``LIMIT_EXCEEDED``.
    """
    if len(data) <= SMALL_BYTES:
        return
    described = _request_of(method)
    if described is not None and _has_more_fields(data, described):
        raise limit_error(f"the request has more than {MOST_FIELDS} fields", field="")


@cache
def _request_of(method: str) -> Descriptor | None:
    try:
        message: Descriptor = (
            descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", ".")).input_type
        )
    except KeyError:
        return None
    return message


@cache
def _parts_of(message: Descriptor) -> dict[int, Descriptor]:
    """Return the types of the fields that are messages, by number."""
    return {field.number: field.message_type for field in message.fields if field.message_type is not None}


def _has_more_fields(data: bytes, message: Descriptor) -> bool:
    """Count until there are too many, or until the data ends or is malformed, where parsing would end too."""
    position, end, parts = 0, len(data), _parts_of(message)
    around: list[tuple[int, dict[int, Descriptor]]] = []  # the messages around this one, each with its end and parts
    try:
        for _ in range(MOST_FIELDS):
            while position >= end:
                if not around:
                    return False
                end, parts = around.pop()
            tag, position = _varint(data, position)
            kind, size = tag & 7, 0
            if kind in {_VARINT, _DELIMITED}:
                size, position = _varint(data, position)
            if kind == _DELIMITED:
                part = parts.get(tag >> 3)
                if part is not None:
                    around.append((end, parts))
                    end, parts = min(position + size, end), _parts_of(part)
                    continue
                position += size
            position += _FIXED.get(kind, 0)
    except IndexError:
        return False
    return position < end or any(position < after for after, _ in around)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    position += 1
    if byte < 0x80:
        return byte, position
    value, shift = byte & 0x7F, 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError
