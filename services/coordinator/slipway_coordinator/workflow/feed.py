"""Changes of all exports for watchers of whole projects, read once for all of them and kept in memory for a while.

A watcher that has fallen behind what is in memory reads the table itself, so a slow one delays no other. Of progress, each watcher that asked
for it gets the newest of each task.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from slipway.errors import ServiceError
from slipway_coordinator.lifecycle.changes import IN_MEMORY, IN_MEMORY_SIZE, ChangeKind
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.storage.changes import AT_ONCE, BEGINNING, Changes, NumberedChange, Position
from slipway_coordinator.storage.filters import Predicate
from slipway_protos.v1 import export_pb2

T = TypeVar("T")

log = logging.getLogger("slipway.coordinator.feed")

_READ_AT_ONCE = 200
_MOST_TASKS = 1000
"""Tasks whose progress waits for a watcher."""
_PROGRESS_SECONDS = 1.0
_BOOKMARK_SECONDS = 30.0
_PAUSE_SECONDS = 1.0
_MOST_FAILURES = 30
"""How often in a row the table may not be readable before all streams end."""


class Call(Protocol):
    """Runs a blocking function in a thread; see ``Coordinator.call``."""

    async def __call__(self, function: Callable[[], T]) -> T:
        """Return what the function returns."""


@dataclass(frozen=True, slots=True)
class TaskAdvance:
    """Progress of a task of an export; ``time`` in seconds since the epoch."""

    record: ExportRecord
    progress: export_pb2.TaskProgress
    time: float


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """What a watcher receives: a change, progress, or neither; and the place from which it can continue."""

    position: Position
    change: NumberedChange | None = None
    advance: TaskAdvance | None = None


@dataclass(eq=False)
class _Watcher:
    """One watcher: the projects it watches (None: all), and the progress that waits for it if it asked for any."""

    projects: Collection[str] | None
    progress: bool
    news: asyncio.Event = field(default_factory=asyncio.Event)
    advances: dict[tuple[str, str], TaskAdvance] = field(default_factory=dict)

    def sees(self, project: str) -> bool:
        return self.projects is None or project in self.projects

    def add(self, advance: TaskAdvance) -> None:
        if not self.progress or not self.sees(advance.record.project):
            return
        key = (advance.record.name, advance.progress.task)
        self.advances.pop(key, None)
        self.advances[key] = advance
        if len(self.advances) > _MOST_TASKS:
            del self.advances[next(iter(self.advances))]
        self.news.set()

    def drop(self, export: str) -> None:
        """Forget progress of an export that has ended: it would come after the end."""
        for key in [key for key in self.advances if key[0] == export]:
            del self.advances[key]

    def take(self) -> list[TaskAdvance]:
        taken = list(self.advances.values())
        self.advances.clear()
        return taken


class Feed:
    """Changes of all exports of one coordinator. All methods run on one event loop.

    Args:
        changes: The table.
        call: Runs a blocking function in a thread.
    """

    def __init__(self, changes: Changes, call: Call) -> None:
        self._changes = changes
        self._call = call
        self._tail: deque[NumberedChange] = deque()
        self._tail_size = 0
        self._position = BEGINNING
        self._turn = asyncio.Lock()
        self._stored = asyncio.Event()
        self._watchers: set[_Watcher] = set()
        self._failures = 0

    def note_stored(self) -> None:
        """Look for changes that a transaction has stored, which has just ended."""
        if self._changes.take_added():
            self._stored.set()

    def note_progress(self, record: ExportRecord, progress: export_pb2.TaskProgress) -> None:
        """Pass progress of a task of an export on."""
        advance = TaskAdvance(record, progress, time.time())
        for watcher in self._watchers:
            watcher.add(advance)

    async def run(self) -> None:
        """Read what was stored and wake the watchers, for as long as the coordinator runs."""
        while True:
            await self._stored.wait()
            self._stored.clear()
            try:
                await self._read_stored()
                self._failures = 0
                continue
            except ServiceError as error:
                log.warning(f"changes of exports cannot be read now: {error}")
            except Exception:  # if this loop ended, no watcher would ever receive anything again
                log.exception("changes of exports cannot be read")
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                self._wake()
            await asyncio.sleep(_PAUSE_SECONDS)
            self._stored.set()

    async def check(self, position: Position) -> None:
        """Check that a watcher can continue from a place.

        Raises:
            ServiceError: reason ``CURSOR_EXPIRED``.
        """
        if not await self._call(lambda: self._changes.has(position)):
            raise _expired_error()

    async def watch(
        self,
        start: Position | None,
        *,
        projects: Collection[str] | None,
        matches: Predicate = lambda _: True,
        progress: bool = False,
    ) -> AsyncGenerator[FeedEvent, None]:
        """Yield what happens from a place on, without end. Begins with an event without content, and yields one after each silence.

        Args:
            start: The place, checked; None for now.
            projects: Projects to watch; None for all.
            matches: Says of which exports.
            progress: Whether progress is wanted.

        Raises:
            ServiceError: reason ``CURSOR_EXPIRED`` if the reader was so slow that changes were forgotten which it has not read;
                ``COORDINATOR_UNAVAILABLE`` if changes cannot be read for long.
        """
        watcher, clock = _Watcher(projects, progress), asyncio.get_running_loop().time
        try:
            await self._begin(watcher)
            at = self._position if start is None else start
            yield FeedEvent(at)
            told = clock()
            while True:
                watcher.news.clear()
                self._check_readable()
                while at.sequence < self._position.sequence:
                    batch, reached = await self._next(at, watcher)
                    for change in batch:
                        if matches(change.change.export):
                            yield FeedEvent(change.position, change=change)
                            told = clock()
                    at = reached
                taken = watcher.take()
                for advance in taken:
                    if matches(advance.record):
                        yield FeedEvent(at, advance=advance)
                        told = clock()
                if taken:  # even if none was shown: at most once a second is looked
                    await asyncio.sleep(_PROGRESS_SECONDS)
                if not await _is_set_in_time(watcher.news, told + _BOOKMARK_SECONDS - clock()):
                    if not self._failures:  # otherwise something may have happened
                        yield FeedEvent(at)
                    told = clock()
        finally:
            self._watchers.discard(watcher)

    async def _begin(self, watcher: _Watcher) -> None:
        async with self._turn:
            self._check_readable()
            if not self._watchers:  # nothing was read since the last one left
                self._tail.clear()
                self._tail_size = 0
                self._position = await self._call(self._changes.newest)
            self._watchers.add(watcher)

    async def _read_stored(self) -> None:
        async with self._turn:
            while self._watchers:
                after = self._position.sequence
                rows = await self._call(lambda after=after: self._changes.after(after, limit=_READ_AT_ONCE))  # type: ignore[misc]
                if not rows:
                    return
                self._keep(rows)
                self._position = rows[-1].position
                self._wake()

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.news.set()

    def _check_readable(self) -> None:
        if self._failures >= _MOST_FAILURES:
            raise ServiceError("changes of exports cannot be read", remedy="try again; the coordinator's log says why")

    def _keep(self, rows: Iterable[NumberedChange]) -> None:
        for row in rows:
            self._tail.append(row)
            self._tail_size += row.size
        while len(self._tail) > IN_MEMORY or self._tail_size > IN_MEMORY_SIZE:
            self._tail_size -= self._tail.popleft().size

    async def _next(self, at: Position, watcher: _Watcher) -> tuple[list[NumberedChange], Position]:
        """Return the same as :meth:`_since`, and forget the progress of exports that have ended by then."""
        batch, reached = await self._since(at, watcher)
        for change in batch:
            if _is_end(change):
                watcher.drop(change.change.export.name)
        return batch, reached

    async def _since(self, at: Position, watcher: _Watcher) -> tuple[list[NumberedChange], Position]:
        """Return changes behind a place that a watcher sees, and the place up to which these are all. Without changes, it is the newest."""
        reached = self._position
        if self._tail and self._tail[0].sequence <= at.sequence + 1:
            return self._in_memory(at, watcher)
        oldest, batch = await self._call(lambda: self._read(at.sequence, watcher.projects))
        if oldest > at.sequence + 1:
            raise _expired_error()
        return batch, batch[-1].position if batch else reached

    def _in_memory(self, at: Position, watcher: _Watcher) -> tuple[list[NumberedChange], Position]:
        """Return the same from memory. They stay there until a slow watcher has taken them, so they are few."""
        missed = list(itertools.takewhile(lambda change: change.sequence > at.sequence, reversed(self._tail)))
        batch, room, reached = list[NumberedChange](), AT_ONCE, at
        for change in reversed(missed):
            if room <= 0:
                break
            reached = change.position
            if watcher.sees(change.change.export.project):
                batch.append(change)
                room -= change.size
        return batch, reached

    def _read(self, after: int, projects: Collection[str] | None) -> tuple[int, list[NumberedChange]]:
        batch = self._changes.after(after, limit=_READ_AT_ONCE, projects=projects)
        return self._changes.oldest(), batch  # in this order: what is read now may be forgotten a moment later


def _is_end(change: NumberedChange) -> bool:
    return change.change.kind is ChangeKind.DELETED or change.change.export.state.ended


async def _is_set_in_time(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return False if it is time to say that nothing happened, even if much happened that is not shown."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return seconds > 0


def _expired_error() -> ServiceError:
    return ServiceError(
        "what happened since this cursor is not known any more",
        reason="CURSOR_EXPIRED",
        remedy="watch without a cursor, and list the exports after that",
        about={"field": "cursor"},
    )
