"""The table of changes: what happened to exports, numbered without gaps in the order in which it became durable.

A change is written in the transaction that makes it. Only the newest :data:`CHANGES_KEPT` are kept, and about
:data:`BYTES_KEPT` of them, for watchers who come back.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa
from pydantic import ValidationError

from slipway.texts import one_line
from slipway_coordinator.lifecycle.changes import ChangeKind, ExportChange
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.schema import changes as _changes

log = logging.getLogger("slipway.coordinator.changes")

CHANGES_KEPT, BYTES_KEPT = 20_000, 256 << 20
AT_ONCE = 1 << 20
"""Characters that are read at a time: labels may be long."""
_FORGET_EVERY = 500

_ADD_NEXT = sa.text("""
    INSERT INTO slipway_changes (sequence, time, project, change)
    SELECT COALESCE(MAX(sequence), 0) + 1, :time, :project, :change FROM slipway_changes
    RETURNING sequence
""")
_ADD = sa.text(
    "INSERT INTO slipway_changes (sequence, time, project, change) VALUES (:sequence, :time, :project, :change)"
)
_LAST = sa.text("SELECT COALESCE(MAX(sequence), 0) FROM slipway_changes")
_NUMBER_ALONE = sa.text("SELECT pg_advisory_xact_lock(hashtext('slipway_changes'))")
"""A statement of its own, because the next one sees what was committed before it begins, not what was while it waited."""
_BYTES = {"sqlite": "LENGTH(CAST(change AS BLOB))", "postgresql": "OCTET_LENGTH(change)"}
_FORGET_LARGE = """
    DELETE FROM slipway_changes WHERE sequence <= (
        SELECT MAX(sequence) FROM (
            SELECT sequence, SUM({bytes}) OVER (ORDER BY sequence DESC) AS together FROM slipway_changes
        ) AS sizes WHERE together > :most)
"""
"""Forgets what is older than the newest changes of so many bytes."""
_STATE = sa.text("SELECT state FROM slipway_exports WHERE name = :name")
_RECORD = sa.text("SELECT record FROM slipway_exports WHERE name = :name")
_CURSOR = re.compile(r"([0-9a-f]{1,15})-([0-9a-f]{1,15})")


class Position(NamedTuple):
    """A place between two changes: behind the change of this number, with this mark.

    The mark is a part of the row's hash. It tells the changes of a state from those of a restored copy, which may have other changes
    under the same numbers, and says nothing about the row: whoever may watch one project gets places behind changes of others.
    """

    sequence: int
    mark: int

    @property
    def cursor(self) -> str:
        """The place as a text for clients."""
        return f"{self.sequence:x}-{self.mark:x}"

    @classmethod
    def parse(cls, cursor: str) -> Position | None:
        """Return the place that a client names; None for a text that is none."""
        match = _CURSOR.fullmatch(cursor)
        return None if match is None else cls(int(match[1], 16), int(match[2], 16))


BEGINNING = Position(0, 0)
"""The place before the first change of a state."""


class NumberedChange(NamedTuple):
    """A stored change; its time is in seconds since the epoch, its size that of the row in characters, its mark that of its place."""

    sequence: int
    time: float
    change: ExportChange
    size: int
    mark: int

    @property
    def position(self) -> Position:
        """The place behind it."""
        return Position(self.sequence, self.mark)


class Changes:
    """The table of changes. All calls block for some milliseconds; those that note a change join the open transaction.

    A transaction writes its changes at its end, together, so it takes the lock of the numbers last and holds it for a short time.

    Args:
        transactions: The transactions of the coordinator.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._added = False

    def take_added(self) -> bool:
        """Return whether changes were added since the last call, whose transaction may have failed. Called between transactions."""
        added, self._added = self._added, False
        return added

    def note_creation(self, record: ExportRecord) -> None:
        """Store that an export was created."""
        self._add(ExportChange.of(ChangeKind.CREATED, record))

    def read_state(self, export: str) -> ExportState | None:
        """Return the state of a stored export, for :meth:`note_state`; None if there is none."""
        with self._transactions.begin() as connection:
            state = connection.execute(_STATE, {"name": export}).scalar()
        return None if state is None else ExportState(state)

    def note_state(self, before: ExportState | None, after: ExportRecord) -> None:
        """Store that a new revision of an export was made, if its state is another one."""
        if before is not None and before is not after.state:
            self._add(ExportChange.of(ChangeKind.STATE_CHANGED, after, previous=before))

    def note_deletion(self, export: str) -> None:
        """Store that an export is about to be deleted, if there is one."""
        with self._transactions.begin() as connection:
            text = connection.execute(_RECORD, {"name": export}).scalar()
        if text is not None:
            record = ExportRecord.model_validate_json(text)
            self._add(ExportChange.of(ChangeKind.DELETED, record, previous=record.state))

    def after(self, sequence: int, *, limit: int, projects: Collection[str] | None = None) -> list[NumberedChange]:
        """Return the first changes behind a number, of some projects (None: of all), in their order.

        At most ``limit``, and no more once they have :data:`AT_ONCE` characters; none if none is there.
        """
        while True:
            rows = self._rows(sequence, limit=limit, projects=projects)
            found = [change for change in map(_parsed, rows) if change is not None]
            if found or not rows:
                return found
            sequence = rows[-1][0]

    def _rows(self, sequence: int, *, limit: int, projects: Collection[str] | None) -> list[tuple[int, float, str]]:
        query = sa.select(_changes.c.sequence, _changes.c.time, _changes.c.change).where(_changes.c.sequence > sequence)
        if projects is not None:
            query = query.where(_changes.c.project.in_(sorted(projects)))
        with self._transactions.begin() as connection:
            rows, room = list[tuple[int, float, str]](), AT_ONCE
            for row in connection.execute(query.order_by(_changes.c.sequence).limit(limit)):
                rows.append((row[0], row[1], row[2]))
                room -= len(row[2])
                if room < 0:
                    break
        return rows

    def newest(self) -> Position:
        """Return the place behind the newest change."""
        return self._position(_changes.c.sequence == sa.select(sa.func.max(_changes.c.sequence)).scalar_subquery())

    def has(self, position: Position) -> bool:
        """Return whether everything that happened since a place is still there."""
        if position == BEGINNING:
            return self.oldest() <= 1
        return self._position(_changes.c.sequence == position.sequence) == position

    def oldest(self) -> int:
        """Return the number of the oldest change that is kept; 0 if there is none."""
        with self._transactions.begin() as connection:
            return connection.execute(sa.select(sa.func.min(_changes.c.sequence))).scalar() or 0

    def _position(self, condition: sa.ColumnElement[bool]) -> Position:
        with self._transactions.begin() as connection:
            row = connection.execute(
                sa.select(_changes.c.sequence, _changes.c.time, _changes.c.change).where(condition)
            ).first()
        return BEGINNING if row is None else Position(row[0], _mark(row[1], row[2]))

    def _add(self, change: ExportChange) -> None:
        self._added = True
        row = {"time": time.time(), "project": change.export.project, "change": change.model_dump_json()}
        with self._transactions.begin():
            self._transactions.write_at_end(self._write, row)

    def _write(self, connection: sa.Connection, rows: list[dict[str, Any]]) -> None:
        """Store the changes of a transaction under the next numbers; no other transaction numbers any until this one ends."""
        if connection.dialect.name == "postgresql":  # SQLite has one writer at a time
            connection.execute(_NUMBER_ALONE)
        if len(rows) == 1:
            last = connection.execute(_ADD_NEXT, rows[0]).scalar_one()
        else:
            first = connection.execute(_LAST).scalar_one() + 1
            last = first + len(rows) - 1
            connection.execute(_ADD, [row | {"sequence": number} for number, row in enumerate(rows, first)])
        if last // _FORGET_EVERY > (last - len(rows)) // _FORGET_EVERY:
            self._forget(connection, last - CHANGES_KEPT)

    def _forget(self, connection: sa.Connection, sequence: int) -> None:
        """Forget the changes up to a number, and the oldest ones if the rest is too large: labels may be long."""
        connection.execute(sa.delete(_changes).where(_changes.c.sequence <= sequence))
        forget = sa.text(_FORGET_LARGE.format(bytes=_BYTES[connection.dialect.name]))
        connection.execute(forget, {"most": BYTES_KEPT})


def _parsed(row: tuple[int, float, str]) -> NumberedChange | None:
    """Return the change in a row; None, and a line in the log, for one that cannot be parsed: others must not wait for it for ever."""
    number, at, text = row
    try:
        change = ExportChange.model_validate_json(text)
    except ValidationError as error:
        log.error(f"the change {number} of an export is left out, it cannot be read: {one_line(str(error))}")
        return None
    return NumberedChange(number, at, change, len(text), _mark(at, text))


def _mark(at: float, change: str) -> int:
    """Return the mark of a row. It cannot be guessed, as little as the span in the change, or the time to a microsecond."""
    return int(hashlib.sha256(f"{round(at * 1e6)} {change}".encode()).hexdigest()[:15], 16)
