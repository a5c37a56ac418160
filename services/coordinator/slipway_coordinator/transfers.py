"""Content that passes through the coordinator: how much at a time, and blocking work on it in threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

T = TypeVar("T")

AT_ONCE = 16
"""Files that pass at a time; with what each holds in memory, this bounds what they take together."""
EACH = 4
"""Those of one caller."""


class Transfers:
    """Turns of callers, and the threads that do their work. All methods run on one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._interested: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="slipway-transfers")

    @contextlib.asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it; a caller waits for its own others first, so that it cannot take them all."""
        own = self._own.setdefault(caller, asyncio.Semaphore(EACH))
        self._interested[caller] += 1
        try:
            async with own, self._turns:
                yield
        finally:
            self._interested[caller] -= 1
            if not self._interested[caller]:
                del self._interested[caller], self._own[caller]

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call in a thread. Who is cancelled meanwhile waits for its end, so that nobody cleans up under its hands."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # nobody else asks for it
            raise

    async def stream(self, chunks: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """What a blocking iterator gives; the next chunk is read while one is sent."""
        coming = asyncio.ensure_future(self.run(next, chunks, None))
        try:
            while (data := await coming) is not None:
                coming = asyncio.ensure_future(self.run(next, chunks, None))
                yield data
        finally:
            await asyncio.wait([coming])
            await self.run(cast("Any", chunks).close)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
