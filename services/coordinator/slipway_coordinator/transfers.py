"""Content that passes through the coordinator: how much at a time, and blocking work on it in threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from slipway import metrics
from slipway.errors import ModelExportError, ServiceError
from slipway.wire import RETRY_AFTER

T = TypeVar("T")

AT_ONCE = 16
"""Files that pass at a time; with what each holds in memory, this bounds what they take together."""
EACH = 4
"""Those of one caller."""
_RETRY_SECONDS = "1"


class Transfers:
    """Turns of callers, and the threads that do their work. All methods run on one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._interested: Counter[str] = Counter()
        self._uploads: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="slipway-transfers")

    @contextlib.contextmanager
    def upload(self, project: str, *, most: int) -> Iterator[None]:
        """Be one of a project's uploads, whether it has its turn or waits for it.

        Raises:
            ServiceError: reason ``UPLOADS_FULL``.
        """
        if self._uploads[project] >= most:
            raise ServiceError(
                f"{project} has {most} uploads open, which is as many as are allowed",
                reason="UPLOADS_FULL",
                remedy="try again later, or raise the coordinator's SLIPWAY_OPEN_UPLOADS",
                about={RETRY_AFTER: _RETRY_SECONDS},
            )
        self._uploads[project] += 1
        try:
            yield
        finally:
            self._uploads[project] -= 1
            if not self._uploads[project]:
                del self._uploads[project]

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


@contextlib.contextmanager
def counting_refusals(direction: str) -> Iterator[None]:
    """Count what ends a transfer that is ``received`` or ``sent``."""
    try:
        yield
    except ModelExportError as error:
        metrics.CLIENT_REFUSALS.add(direction=direction, reason=error.reason)
        raise
