"""The inbox of a workflow: a durable, numbered list of events for every run of an export.

An event is stored in the same transaction as its cause, once per key, and never changes. The list is kept as long as its
export, so a workflow reads the same events again after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import sqlalchemy as sa

from slipway_coordinator.lifecycle.transitions import Event
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.schema import events as _events


class InboxEvent(NamedTuple):
    """An event in a run's list; ``number`` counts from 1."""

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

    def put(self, export: str, event: Event, key: str) -> InboxEvent | None:
        """Append an event to the run's list; return the entry stored under its key, None if the export has ended."""
        with self._transactions.begin() as connection:
            values = {"export": export, "key": key, "event": event.model_dump_json(exclude_defaults=True)}
            row = connection.execute(_PUT, values).first()
            return self.find(key) if row is None else InboxEvent(export, row.run, row.number, event)

    def find(self, key: str) -> InboxEvent | None:
        """Return the entry stored under a key, if any."""
        with self._transactions.begin() as connection:
            row = connection.execute(sa.select(_events).where(_events.c.key == key)).first()
        return (
            None if row is None else InboxEvent(row.export, row.run, row.number, Event.model_validate_json(row.event))
        )

    def read(self, export: str, run: int, *, after: int = 0) -> list[InboxEvent]:
        """Return the events of a run after number ``after``."""
        query = sa.select(_events.c.number, _events.c.event).order_by(_events.c.number)
        query = query.where(_events.c.export == export, _events.c.run == run, _events.c.number > after)
        with self._transactions.begin() as connection:
            rows = connection.execute(query).all()
        return [InboxEvent(export, run, row.number, Event.model_validate_json(row.event)) for row in rows]


@dataclass
class _Box:
    messages: list[InboxEvent] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class Inbox:
    """Hands stored and new events to the workflows of this process.

    Args:
        read: Reads events as :meth:`Events.read` does.
        on_first: Called with export and run for the first event of a run that rests.
    """

    def __init__(
        self,
        read: Callable[[str, int, int], Awaitable[list[InboxEvent]]],
        on_first: Callable[[str, int], None] = lambda _export, _run: None,
    ) -> None:
        self._read = read
        self._on_first = on_first
        self._boxes: dict[tuple[str, int], _Box] = {}
        self._resting: dict[str, int] = {}

    def deliver(self, message: InboxEvent | None) -> None:
        """Hand a stored event to its workflow; do nothing for None. Harmless to repeat."""
        if message is None:
            return
        if self._resting.get(message.export) == message.run:
            del self._resting[message.export]
            self._on_first(message.export, message.run)
            return
        box = self._boxes.get((message.export, message.run))
        if box is not None:
            box.messages.append(message)
            box.arrived.set()

    def open(self, export: str, run: int) -> None:
        """Collect the events of a new run from now on; nothing happened before, so nothing is read."""
        self._boxes.setdefault((export, run), _Box())

    def rest(self, export: str, run: int) -> bool:
        """Keep nothing of a run until its next event; return False if there was one since :meth:`open`. Then its workflow reads them all."""
        box = self._boxes.pop((export, run), None)
        if box is not None and box.messages:
            return False
        self._resting[export] = run
        return True

    async def after(self, export: str, run: int, number: int) -> list[InboxEvent]:
        """Wait for and return the events of a run after this number."""
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
            if news:  # there is a gap: an earlier event is stored but not yet delivered
                return await self._read(export, run, number)
            await box.arrived.wait()

    def close(self, export: str, run: int) -> None:
        """Stop collecting the events of a run."""
        self._boxes.pop((export, run), None)
        if self._resting.get(export) == run:
            del self._resting[export]
