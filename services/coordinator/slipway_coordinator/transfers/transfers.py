"""Content that passes through the coordinator: how much at a time, how fast, and blocking work on it in threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from slipway.errors import ModelExportError, ServiceError
from slipway.observability import metrics
from slipway.rpc.wire import RETRY_AFTER
from slipway_coordinator.transfers.turns import Turns

T = TypeVar("T")
Item = TypeVar("Item")

_RETRY_SECONDS = "1"
_ITEMS_OF_A_LOOK = 64


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """What passes through a coordinator at a time, and how fast.

    Attributes:
        at_once: Files in each direction, and looks at the store; with what a file holds in memory, this bounds what they take together.
        each: Those of one principal.
        bytes_per_second: What a client has to send or read on average, while the coordinator waits for it.
        patience_seconds: How far a client may fall behind that: how long it may send or read nothing.
    """

    at_once: int = 16
    each: int = 4
    bytes_per_second: int = 16 << 10
    patience_seconds: float = 60.0


class Pace:
    """Whether a client is fast enough. Its patience ends with the time that it lets the coordinator wait, and grows with every byte.

    Only waiting for the client counts, so nobody is blamed for a slow store.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self._left = limits.patience_seconds

    async def next(self, messages: AsyncIterator[T]) -> T | None:
        """Return the next message of a client, None after the last one.

        Raises:
            ServiceError: reason ``TRANSFER_SLOW``.
        """
        with self._waiting():
            try:
                async with asyncio.timeout(self._left) as waiting:
                    return await anext(messages, None)
            except TimeoutError as error:
                if not waiting.expired():
                    raise
                raise self._too_slow() from error

    @contextlib.contextmanager
    def sending(self, count: int) -> Iterator[None]:
        """Count bytes that are sent in a block, which lasts until the client has room for what follows.

        Raises:
            ServiceError: reason ``TRANSFER_SLOW``, after the block.
        """
        with self._waiting():
            yield
        if self._left <= 0:
            raise self._too_slow()
        self.passed(count)

    def passed(self, count: int) -> None:
        """Count bytes that the client has sent or read."""
        limits = self._limits
        self._left = min(limits.patience_seconds, self._left + count / limits.bytes_per_second)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._left -= time.monotonic() - began

    def _too_slow(self) -> ServiceError:
        limits = self._limits
        return ServiceError(
            f"the client sent or read less than {limits.bytes_per_second} bytes a second for {limits.patience_seconds:g} s",
            reason="TRANSFER_SLOW",
            remedy="try again over a faster network, or lower the coordinator's SLIPWAY_TRANSFER_RATE",
        )


class Transfers:
    """Turns of callers, and the threads that do their work: apart for what comes in, what goes out, and looks at the store.

    All methods run on one event loop.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self.incoming = Lane(limits, "in")
        self.outgoing = Lane(limits, "out")
        self.looks = Lane(limits, "looks")
        self._uploads: Counter[str] = Counter()

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

    def pace(self) -> Pace:
        """Begin to measure how fast a client is."""
        return Pace(self._limits)

    async def look(self, principal: str, project: str, function: Callable[..., T], *arguments: Any) -> T:
        """Wait for a turn, and call something short in a thread."""
        async with self.looks.turn(principal, project=project):
            return await self.looks.run(function, *arguments)

    async def look_at_each(
        self, principal: str, project: str, function: Callable[[Item], T], items: Iterable[Item]
    ) -> list[T]:
        """Call it for each of any number of items, some of them in a turn, so that the looks of others come between."""
        rest = iter(items)
        found: list[list[T]] = []

        def look_at(batch: list[Item], results: list[T]) -> None:
            results.extend(function(item) for item in batch)

        async def some() -> None:
            while batch := list(itertools.islice(rest, _ITEMS_OF_A_LOOK)):
                found.append([])  # in the order of the items, whichever is done first
                await self.look(principal, project, look_at, batch, found[-1])

        try:
            async with asyncio.TaskGroup() as group:  # the first failure ends the others
                for _ in range(self._limits.each):
                    group.create_task(some())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [result for results in found for result in results]

    def close(self) -> None:
        """Let the threads end."""
        for lane in (self.incoming, self.outgoing, self.looks):
            lane.threads.shutdown(wait=False, cancel_futures=True)


class Lane:
    """One kind of work: its turns, and a thread for each of them."""

    def __init__(self, limits: TransferLimits, name: str) -> None:
        self._turns = Turns(limits.at_once, each=limits.each)
        self.threads = ThreadPoolExecutor(limits.at_once, thread_name_prefix=f"slipway-{name}")

    @property
    def busy(self) -> int:
        """How many turns are held."""
        return self._turns.busy

    def turn(self, principal: str, *, project: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for a turn, and hold it."""
        return self._turns.one(principal, project=project)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do the blocking work of a turn. Who is cancelled meanwhile waits for its end, so that nobody cleans up under its hands."""
        future = asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # nobody else asks for it
            raise

    async def stream(self, chunks: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """Yield what a blocking iterator gives; the next chunk is read while one is sent."""
        coming = asyncio.ensure_future(self.run(next, chunks, None))
        try:
            while (data := await coming) is not None:
                coming = asyncio.ensure_future(self.run(next, chunks, None))
                yield data
        finally:
            await asyncio.wait([coming])
            await self.run(cast("Any", chunks).close)


@contextlib.contextmanager
def counting_refusals(direction: str) -> Iterator[None]:
    """Count what ends a transfer that is ``received`` or ``sent``."""
    try:
        yield
    except ModelExportError as error:
        metrics.CLIENT_REFUSALS.add(direction=direction, reason=error.reason)
        raise
