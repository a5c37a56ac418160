"""Transfers of content through the coordinator: limits, speed, blocking work in threads, and interrupted uploads to resume."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from slipway.artifacts.blobs import BlobWriter
from slipway.errors import ModelExportError, ServiceError
from slipway.observability import metrics
from slipway.rpc.values import RETRY_AFTER
from slipway.security.turns import Turns

T = TypeVar("T")
Item = TypeVar("Item")

_RETRY_SECONDS = "1"
_ITEMS_OF_A_LOOK = 64

Key = tuple[str, str, str]
"""Principal, project and digest, so that nobody can continue, or learn of, another principal's upload."""

_SECONDS = 300.0
_MOST, _EACH = 16, 4


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits of transfers through a coordinator.

    Attributes:
        at_once: Concurrent files in each direction, and concurrent lookups in the store; this bounds the memory for transfers.
        each: The same for one principal.
        bytes_per_second: Average speed at which a client must send or read while the coordinator waits for it.
        patience_seconds: How far a client may fall behind that speed: the longest time it may send or read nothing.
    """

    at_once: int = 16
    each: int = 4
    bytes_per_second: int = 16 << 10
    patience_seconds: float = 60.0


class Pace:
    """Measures whether a client is fast enough: waiting for it uses up patience, every byte restores some.

    Only waiting for the client counts, so a slow store is never its fault.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self._left = limits.patience_seconds

    async def next(self, messages: AsyncIterator[T]) -> T | None:
        """Return the next message of a client, None after the last one.

        Raises:
            ServiceError: reason ``TRANSFER_SLOW``.
        """
        with self._measure_wait():
            try:
                async with asyncio.timeout(self._left) as waiting:
                    return await anext(messages, None)
            except TimeoutError as error:
                if not waiting.expired():
                    raise
                raise self._too_slow_error() from error

    @contextlib.contextmanager
    def measure_sending(self, count: int) -> Iterator[None]:
        """Measure a block that sends bytes; it lasts until the client has room for more.

        Raises:
            ServiceError: reason ``TRANSFER_SLOW``, after the block.
        """
        with self._measure_wait():
            yield
        if self._left <= 0:
            raise self._too_slow_error()
        self.count_bytes(count)

    def count_bytes(self, count: int) -> None:
        """Count bytes that the client has sent or read."""
        limits = self._limits
        self._left = min(limits.patience_seconds, self._left + count / limits.bytes_per_second)

    @contextlib.contextmanager
    def _measure_wait(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._left -= time.monotonic() - began

    def _too_slow_error(self) -> ServiceError:
        limits = self._limits
        return ServiceError(
            f"the client sent or read less than {limits.bytes_per_second} bytes a second for {limits.patience_seconds:g} s",
            reason="TRANSFER_SLOW",
            remedy="try again over a faster network, or lower the coordinator's SLIPWAY_TRANSFER_RATE",
        )


class Transfers:
    """Callers' turns, and threads for their work, separate for uploads, downloads and lookups in the store.

    All methods run on one event loop.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self.incoming = Lane(limits, "in")
        self.outgoing = Lane(limits, "out")
        self.looks = Lane(limits, "looks")
        self._uploads: Counter[str] = Counter()
        self.interrupted = InterruptedUploads(lambda writer: self.incoming.run(writer.discard))

    @contextlib.contextmanager
    def upload(self, project: str, *, most: int) -> Iterator[None]:
        """Count as one of a project's open uploads within a block, waiting for a turn or not.

        Raises:
            ServiceError: reason ``UPLOADS_FULL``.
        """
        if self._uploads[project] >= most:
            raise ServiceError(
                f"{project} has {most} uploads open, the most allowed",
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

    def pace(self) -> Pace:
        """Begin to measure a client's speed."""
        return Pace(self._limits)

    async def look_up(self, principal: str, project: str, function: Callable[..., T], *arguments: Any) -> T:
        """Wait for a turn, then call a short function in a thread."""
        async with self.looks.turn(principal, project=project):
            return await self.looks.run(function, *arguments)

    async def look_up_each(
        self, principal: str, project: str, function: Callable[[Item], T], items: Iterable[Item]
    ) -> list[T]:
        """Call a function for each item, a batch per turn, so that other callers' lookups run in between."""
        rest = iter(items)
        batches: list[list[T]] = []

        def look_at(batch: list[Item], results: list[T]) -> None:
            results.extend(function(item) for item in batch)

        async def some() -> None:
            while batch := list(itertools.islice(rest, _ITEMS_OF_A_LOOK)):
                batches.append([])  # keeps the order of the items, whichever batch ends first
                await self.look_up(principal, project, look_at, batch, batches[-1])

        try:
            async with asyncio.TaskGroup() as group:  # the first failure ends the others
                for _ in range(self._limits.each):
                    group.create_task(some())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [result for results in batches for result in results]

    async def close(self) -> None:
        """Discard interrupted uploads, and end the threads."""
        await self.interrupted.close()
        for lane in (self.incoming, self.outgoing, self.looks):
            lane.threads.shutdown(wait=False, cancel_futures=True)


class Lane:
    """The turns of one kind of work, with a thread for each."""

    def __init__(self, limits: TransferLimits, name: str) -> None:
        self._turns = Turns(limits.at_once, each=limits.each)
        self.threads = ThreadPoolExecutor(limits.at_once, thread_name_prefix=f"slipway-{name}")

    @property
    def busy(self) -> int:
        """Number of turns held."""
        return self._turns.busy

    def turn(self, principal: str, *, project: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for a turn and hold it within a block."""
        return self._turns.one(principal, project=project)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work in a thread. A cancelled caller still waits for its end, so that cleanup never runs beside it."""
        future = asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # mark it as retrieved
            raise

    async def stream(self, chunks: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """Yield the chunks of a blocking iterator, reading the next one while one is sent."""
        coming = asyncio.ensure_future(self.run(next, chunks, None))
        try:
            while (data := await coming) is not None:
                coming = asyncio.ensure_future(self.run(next, chunks, None))
                yield data
        finally:
            await asyncio.wait([coming])
            await self.run(cast("Any", chunks).close)


@contextlib.contextmanager
def count_refusals(direction: str) -> Iterator[None]:
    """Count the errors that end a ``received`` or ``sent`` transfer."""
    try:
        yield
    except ModelExportError as error:
        metrics.CLIENT_REFUSALS.add(direction=direction, reason=error.reason)
        raise


class InterruptedUploads:
    """Writers that wait for the rest of their content. All methods run on one event loop.

    Each holds at most one part of its upload in memory, as while it is written. The oldest makes room for the next.

    Args:
        discard: Removes what a writer has written.
        seconds: How long each is kept.
        most: How many are kept, in all.
        each: How many of one principal.
    """

    def __init__(
        self,
        discard: Callable[[BlobWriter], Awaitable[None]],
        *,
        seconds: float = _SECONDS,
        most: int = _MOST,
        each: int = _EACH,
    ) -> None:
        self._discard, self._seconds, self._most, self._each = discard, seconds, most, each
        self._kept: dict[Key, tuple[BlobWriter, asyncio.TimerHandle]] = {}
        self._discarding: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, writer: BlobWriter) -> None:
        """Keep a writer, in place of one of the same key."""
        self.drop(key)
        of_principal = [other for other in self._kept if other[0] == key[0]]
        if len(of_principal) >= self._each:
            self.drop(of_principal[0])
        elif len(self._kept) >= self._most:
            self.drop(next(iter(self._kept)))
        timer = asyncio.get_running_loop().call_later(self._seconds, self.drop, key)
        self._kept[key] = writer, timer

    def position(self, key: Key) -> int:
        """Return how many bytes are kept under a key, 0 for none."""
        kept = self._kept.get(key)
        return 0 if kept is None else kept[0].position or 0

    def take(self, key: Key, *, offset: int, size_bytes: int) -> BlobWriter | None:
        """Return the writer of a key, which the caller then owns; None, and it stays, if it ended elsewhere or has another size."""
        writer, _ = self._kept.get(key, (None, None))
        if writer is None or (writer.position, writer.file.size_bytes) != (offset, size_bytes):
            return None
        return self._forget(key)

    def drop(self, key: Key) -> None:
        """Discard the writer of a key, if there is one."""
        writer = self._forget(key)
        if writer is not None:
            task: asyncio.Future[None] = asyncio.ensure_future(self._discard(writer))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    async def close(self) -> None:
        """Discard all."""
        for key in list(self._kept):
            self.drop(key)
        await asyncio.gather(*self._discarding, return_exceptions=True)

    def _forget(self, key: Key) -> BlobWriter | None:
        writer, timer = self._kept.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        return writer
