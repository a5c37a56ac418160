"""Numbered events of exports for watchers; a watcher can resume after any number.

Only the newest state of an export, the newest progress of each task and the last log lines are kept, so a slow watcher skips
outdated events and delays no other reader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_protos.v1 import export_pb2

LOG_LINES_KEPT = 1000
SEQUENCE_BLOCK = 10_000
"""Numbers of events that are reserved at once for an export."""
ENDED_CHANNELS_KEPT = 64

Payload = ExportRecord | export_pb2.TaskProgress | export_pb2.LogLine


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One numbered event; ``time`` in seconds since the epoch."""

    sequence: int
    time: float
    payload: Payload


@dataclass
class _Channel:
    last: int
    limit: int
    kept: dict[tuple[str, ...], WatchEvent] = field(default_factory=dict)
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
        self.kept[key] = WatchEvent(self.last, time.time(), payload)

    def after(self, sequence: int) -> list[WatchEvent]:
        events = []
        for event in reversed(self.kept.values()):
            if event.sequence <= sequence:
                break
            events.append(event)
        return events[::-1]

    def knows(self, payload: Payload) -> bool:
        """Return whether a payload can be dropped: reports after the end or of an unknown task, and states already published."""
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
        load: Returns the current record of an export, None if there is no such export.
        on_progress: Called with every progress of a task that is published.
    """

    def __init__(
        self,
        reserve: Callable[[str], Awaitable[int]],
        load: Callable[[str], Awaitable[ExportRecord | None]],
        on_progress: Callable[[ExportRecord, export_pb2.TaskProgress], None] = lambda _record, _progress: None,
    ) -> None:
        self._reserve = reserve
        self._load = load
        self._on_progress = on_progress
        self._channels: dict[str, _Channel] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(self, name: str, payload: Payload) -> None:
        """Send a payload to everyone who watches an export. Nothing is sent after its end, though a worker's report may arrive later."""
        if isinstance(payload, ExportRecord):
            async with self._turn(name):  # a channel that is just being opened may have read the older revision
                if name not in self._channels:
                    return  # a later watcher begins with the stored record
        channel = await self._channel(name)
        if channel is None or channel.knows(payload):
            return
        if channel.last + 1 >= channel.limit:
            async with self._turn(name):
                if channel.last + 1 >= channel.limit:
                    channel.last = await self._reserve(name)
                    channel.limit = channel.last + SEQUENCE_BLOCK
        channel.keep(payload)
        if isinstance(payload, export_pb2.TaskProgress) and channel.record is not None:
            self._on_progress(channel.record, payload)
        async with channel.changed:
            channel.changed.notify_all()
        if channel.ended:
            self._drop_old()

    async def watch(self, name: str, *, after: int) -> AsyncIterator[WatchEvent]:
        """Yield the events after number ``after`` until the export ends; none for an unknown export."""
        channel = await self._channel(name)
        cursor = after
        while channel is not None:
            for event in channel.after(cursor):
                yield event
                cursor = event.sequence
            if channel.after(cursor):
                continue  # published while the reader handled the last event
            if channel.ended:
                return
            async with channel.changed:
                await channel.changed.wait_for(lambda: bool(channel.after(cursor)))  # noqa: B023 - waited for here

    def forget(self, name: str) -> None:
        """Drop an export's channel, for example because the export was deleted."""
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
