"""Events of exports for those who watch: numbered, kept for a while, and resumable.

Only the newest state of an export and the newest progress of each task are kept, and the last log lines, so a slow watcher
skips what is out of date instead of holding the others up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from slipway_coordinator.model.records import ExportRecord
from slipway_coordinator.storage.database import SEQUENCE_BLOCK
from slipway_protos.v1 import export_pb2

LOG_LINES_KEPT = 1000
ENDED_CHANNELS_KEPT = 64

Payload = ExportRecord | export_pb2.TaskProgress | export_pb2.LogLine


@dataclass(frozen=True, slots=True)
class Happening:
    """One numbered event; ``time`` in seconds since the epoch."""

    sequence: int
    time: float
    payload: Payload


@dataclass
class _Channel:
    last: int
    limit: int
    kept: dict[tuple[str, ...], Happening] = field(default_factory=dict)
    log_lines: list[tuple[str, ...]] = field(default_factory=list)
    record: ExportRecord | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def keep(self, payload: Payload) -> None:
        self.last += 1
        match payload:
            case ExportRecord():
                key: tuple[str, ...] = ("export",)
                self.record = payload
            case export_pb2.TaskProgress():
                key = ("progress", payload.task)
            case _:
                key = ("log", str(self.last))
                self.log_lines.append(key)
                if len(self.log_lines) > LOG_LINES_KEPT:
                    self.kept.pop(self.log_lines.pop(0), None)
        self.kept.pop(key, None)  # so that the new one comes last
        self.kept[key] = Happening(self.last, time.time(), payload)

    def after(self, sequence: int) -> list[Happening]:
        found = []
        for happening in reversed(self.kept.values()):
            if happening.sequence <= sequence:
                break
            found.append(happening)
        return found[::-1]

    def knows(self, payload: Payload) -> bool:
        """Whether nobody has to hear it: reports after the end or of no task, and a state that was read when the channel was opened."""
        if isinstance(payload, ExportRecord):
            return self.record is not None and payload.revision <= self.record.revision
        if isinstance(payload, export_pb2.TaskProgress) and self.record is not None:
            return self.ended or all(task.id != payload.task for task in self.record.tasks)
        return self.ended

    @property
    def ended(self) -> bool:
        return self.record is not None and self.record.state.ended


class Hub:
    """Channels of all exports that run or are watched.

    Args:
        reserve: Reserves the next block of event numbers of an export; see ``Database.reserve_sequences``.
        load: Current state of an export, None when there is no such export.
    """

    def __init__(
        self,
        reserve: Callable[[str], Awaitable[int]],
        load: Callable[[str], Awaitable[ExportRecord | None]],
    ) -> None:
        self._reserve = reserve
        self._load = load
        self._channels: dict[str, _Channel] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(self, name: str, payload: Payload) -> None:
        """Tell everybody who watches an export. Its end is the last they hear: a worker's report may come later."""
        if isinstance(payload, ExportRecord):
            async with self._turn(name):  # a channel that opens just now may have read what was stored before
                if name not in self._channels:
                    return  # who watches it later begins with what is stored then
        channel = await self._channel(name)
        if channel is None or channel.knows(payload):
            return
        if channel.last + 1 >= channel.limit:
            async with self._turn(name):
                if channel.last + 1 >= channel.limit:
                    channel.last = await self._reserve(name)
                    channel.limit = channel.last + SEQUENCE_BLOCK
        channel.keep(payload)
        async with channel.changed:
            channel.changed.notify_all()
        if channel.ended:
            self._drop_old()

    async def watch(self, name: str, *, after: int) -> AsyncIterator[Happening]:
        """What happens after the event of number ``after``, until the export ends. Yields nothing for an unknown export."""
        channel = await self._channel(name)
        cursor = after
        while channel is not None:
            for happening in channel.after(cursor):
                yield happening
                cursor = happening.sequence
            if channel.after(cursor):
                continue  # it happened while its reader was busy with the last one
            if channel.ended:
                return
            async with channel.changed:
                await channel.changed.wait_for(lambda: bool(channel.after(cursor)))  # noqa: B023 - waited for here

    def forget(self, name: str) -> None:
        """Drop what is kept of an export, for example because it was deleted."""
        self._channels.pop(name, None)

    async def _channel(self, name: str) -> _Channel | None:
        async with self._turn(name):
            channel = self._channels.get(name)
            if channel is None:
                record = await self._load(name)
                if record is None:
                    return None
                first = await self._reserve(name)
                channel = self._channels[name] = _Channel(last=first, limit=first + SEQUENCE_BLOCK)
                channel.keep(record)
                if channel.ended:
                    self._drop_old()
            return channel

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    def _drop_old(self) -> None:
        ended = [name for name, channel in self._channels.items() if channel.ended]
        for name in ended[:-ENDED_CHANNELS_KEPT]:
            del self._channels[name]
