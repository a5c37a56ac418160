"""Requests on their way in: how many a server takes in at a time, so that it always has the memory for them.

gRPC keeps what has arrived of a message until all of it is there. A client that begins many large ones and ends none would
fill any memory, so a message is asked for only where its caller has room for one more; until then it waits at the client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakValueDictionary

from slipway.errors import ServiceError
from slipway.security.limits import Limits, Places

Room = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
"""Opens the place of one message on its way in."""


class Incoming:
    """Takes messages in. All methods run on one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of_principal: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._unnamed = Places(
            each=limits.unnamed_requests,
            together=limits.unnamed_requests,
            newer="has newer requests without an identity that have not arrived",
        )

    def of_principal(self, name: str) -> asyncio.Semaphore:
        """Return the room for a principal's messages on their way in; further ones wait."""
        return self._of_principal.setdefault(name, asyncio.Semaphore(self._limits.requests))

    def unnamed(self, address: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the room for callers without an identity; if it is full, the oldest call ends."""
        return self._unnamed.one(address)


async def next_message(stream: AsyncIterator[bytes], room: Room, *, seconds: float) -> bytes | None:
    """Wait for room, then for a stream's next message; None after the last one.

    Raises:
        ServiceError: reason ``CALL_TIMEOUT``.
    """
    try:
        async with asyncio.timeout(seconds) as waiting, room():
            return await anext(aiter(stream), None)
    except TimeoutError as error:
        if not waiting.expired():
            raise
        raise ServiceError(
            f"the next message took longer than {seconds:g} s", reason="CALL_TIMEOUT", remedy="try again"
        ) from error
