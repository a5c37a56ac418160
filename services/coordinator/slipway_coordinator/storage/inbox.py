"""What happened to exports, for their workflows: a durable, numbered list for every run.

An event is stored in the transaction that makes it happen, once per key, and never changes; the list is kept for as long as
its export. A workflow that reads it again after a crash therefore reads the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import sqlalchemy as sa

from slipway_coordinator.model.transitions import Event
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.schema import events as _events


class Message(NamedTuple):
    """An event in a list; ``number`` counts from 1."""

    export: str
    run: int
    number: int
    event: Event


_PUT = sa.text("""
    INSERT INTO slipway_events (export, run, number, key, event)
    SELECT x.name, x.run,
        1 + COALESCE((SELECT MAX(e.number) FROM slipway_events e WHERE e.export = x.name AND e.run = x.run), 0),
        :key, :event
    FROM slipway_exports x WHERE x.name = :export AND NOT x.ended
    ON CONFLICT (key) DO NOTHING RETURNING run, number
""")


class Events:
    """The table of events. All calls block for some milliseconds.

    Args:
        transactions: The database; see :class:`~slipway_coordinator.storage.database.Database`.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def put(self, export: str, event: Event, key: str) -> Message | None:
        """Add an event to the list of an export's run: what stands there under this key, None when the export has ended."""
        with self._transactions.begin() as connection:
            values = {"export": export, "key": key, "event": event.model_dump_json(exclude_defaults=True)}
            row = connection.execute(_PUT, values).first()
            return self.find(key) if row is None else Message(export, row.run, row.number, event)

    def find(self, key: str) -> Message | None:
        """What stands under a key, if anything does."""
        with self._transactions.begin() as connection:
            row = connection.execute(sa.select(_events).where(_events.c.key == key)).first()
        return None if row is None else Message(row.export, row.run, row.number, Event.model_validate_json(row.event))

    def read(self, export: str, run: int, *, after: int = 0) -> list[Message]:
        """The events of a run from the one that follows ``after``."""
        query = sa.select(_events.c.number, _events.c.event).order_by(_events.c.number)
        query = query.where(_events.c.export == export, _events.c.run == run, _events.c.number > after)
        with self._transactions.begin() as connection:
            rows = connection.execute(query).all()
        return [Message(export, run, row.number, Event.model_validate_json(row.event)) for row in rows]


@dataclass
class _Box:
    messages: list[Message] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class Inbox:
    """Hands events to the workflows of this process, as they come, and those that came before.

    Args:
        read: Reads events as :meth:`Events.read` does.
    """

    def __init__(self, read: Callable[[str, int, int], Awaitable[list[Message]]]) -> None:
        self._read = read
        self._boxes: dict[tuple[str, int], _Box] = {}

    def deliver(self, message: Message | None) -> None:
        """Take in what was stored, if it was; harmless to repeat."""
        if message is None:
            return
        box = self._boxes.get((message.export, message.run))
        if box is not None:
            box.messages.append(message)
            box.arrived.set()

    def open(self, export: str, run: int) -> None:
        """Keep the events of a run from now on; nothing has happened in it before, so nothing has to be read."""
        self._boxes.setdefault((export, run), _Box())

    async def after(self, export: str, run: int, number: int) -> list[Message]:
        """The events of a run after that of this number, as soon as there are any."""
        box = self._boxes.get((export, run))
        if box is None:
            box = self._boxes[export, run] = _Box()
            if stored := await self._read(export, run, number):
                return stored
        while True:
            box.arrived.clear()
            news = sorted((message for message in box.messages if message.number > number), key=lambda one: one.number)
            box.messages.clear()
            if news and [message.number for message in news] == list(range(number + 1, number + 1 + len(news))):
                return news
            if news:  # one that was stored earlier is on its way
                return await self._read(export, run, number)
            await box.arrived.wait()

    def close(self, export: str, run: int) -> None:
        """Nobody reads the events of a run any more."""
        self._boxes.pop((export, run), None)
