"""The table of deliveries: events of exports that are to be sent to the receivers of webhooks, each until it has arrived.

A delivery is stored in the transaction of the change it tells, so neither exists without the other. The body is that of the moment of
the change. Repeating a change stores nothing twice: the id of an event follows from the change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa

from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.schema import deliveries as _deliveries

log = logging.getLogger("slipway.coordinator")

BATCH = 200
"""Most deliveries that one call removes or hastens: changes of exports wait for its transaction."""
_LONGEST_WAIT = 3660.0
"""An attempt that is due later was put off before the clock was set back."""

# The changes of an export come in their order, so a new row is the next one exactly if there is no other.
_ADD = sa.text("""
    INSERT INTO slipway_deliveries
        (receiver, id, type, export, export_create_time, revision, create_time, attempts, due_time, is_next, body)
    VALUES
        (:receiver, :id, :type, :export, :export_create_time, :revision, :create_time, 0, :create_time,
        NOT EXISTS (
            SELECT 1 FROM slipway_deliveries
            WHERE receiver = CAST(:receiver AS VARCHAR) AND export = CAST(:export AS VARCHAR)), :body)
    ON CONFLICT DO NOTHING
""")

_ADVANCE = sa.text("""
    UPDATE slipway_deliveries SET is_next = TRUE WHERE receiver = :receiver AND id = (
        SELECT id FROM slipway_deliveries WHERE receiver = :receiver AND export = :export
        ORDER BY export_create_time, revision LIMIT 1)
""")

_RECORD = sa.text("SELECT record FROM slipway_exports WHERE name = :name")

# Each part reads as many rows of an index as it returns; what was never tried is due whatever the clock says.
_PART = """SELECT id FROM (
        SELECT id FROM slipway_deliveries WHERE receiver = :receiver AND is_next = TRUE AND {which} ORDER BY {order} LIMIT :most
    ) AS {name}"""
_DUE = """
    SELECT receiver, id, type, export, export_create_time, revision, create_time, attempts, body
    FROM slipway_deliveries WHERE receiver = :receiver AND id IN ({parts}) ORDER BY {order} LIMIT :most
"""


def _due(order: str) -> sa.TextClause:
    parts = (
        _PART.format(name="untried", which="attempts = 0", order="due_time"),
        _PART.format(name="due", which="due_time <= :now", order=order),
        _PART.format(name="misdated", which="due_time > :latest", order="due_time"),
    )
    return sa.text(_DUE.format(parts=" UNION ".join(parts), order=order))


_LONGEST_DUE, _LEAST_TRIED = _due("due_time"), _due("attempts, due_time")

_HASTEN = sa.text("""
    UPDATE slipway_deliveries SET due_time = CASE WHEN create_time < :now THEN create_time ELSE :now END
    WHERE receiver = :receiver AND id IN (
        SELECT id FROM slipway_deliveries
        WHERE receiver = :receiver AND is_next = TRUE AND due_time > :now AND attempts <= :most_tried LIMIT :most)
""")


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event that is to be sent to a receiver.

    Attributes:
        receiver: Name of the receiver.
        id: Id of the event, the same at every attempt and for all receivers.
        type: Type of the event.
        export: Name of the export.
        export_create_time: When the export was created: another export may get the name of a deleted one.
        revision: Revision of the export that the event tells; the order of an export's events.
        body: What is sent.
        create_time: When it was stored; seconds since the epoch, set by the table.
        attempts: How often it was tried.
    """

    receiver: str
    id: str
    type: str
    export: str
    export_create_time: float
    revision: int
    body: str
    create_time: float = 0.0
    attempts: int = 0


class Waiting(NamedTuple):
    """The deliveries that a receiver has yet to take: how many, and when the oldest was stored."""

    number: int
    oldest: float


class Announcer(Protocol):
    """Makes the deliveries of a change. It is called within the change's transaction, so it is quick."""

    def tell_change(self, before: ExportState | None, after: ExportRecord) -> Sequence[Delivery]:
        """Return the deliveries of a new export (``before`` is None) or of a new revision, whose state may be the same."""

    def tell_deletion(self, record: ExportRecord) -> Sequence[Delivery]:
        """Return the deliveries of an export's deletion."""


class Deliveries:
    """The table. All calls block for some milliseconds, and join an open transaction.

    Args:
        transactions: The database; see :class:`~slipway_coordinator.storage.database.Database`.
        announcer: Makes the deliveries of changes; None if there are no receivers.
    """

    def __init__(self, transactions: Transactions, announcer: Announcer | None = None) -> None:
        self._transactions = transactions
        self._announcer = announcer

    # Within the transaction of a change

    def note_change(self, before: ExportState | None, after: ExportRecord) -> None:
        """Store the deliveries of a change that was just made: of a new export (``before`` is None), or of one that was in this state."""
        if self._announcer is not None:
            tell = self._announcer.tell_change
            self._add(lambda: tell(before, after), after.name)

    def note_deletion(self, export: str) -> None:
        """Store the deliveries of a deletion that is about to be made."""
        if self._announcer is None:
            return
        with self._transactions.begin() as connection:
            text = connection.execute(_RECORD, {"name": export}).scalar()
        if text is not None:
            tell = self._announcer.tell_deletion
            self._add(lambda: tell(ExportRecord.model_validate_json(text)), export)

    def _add(self, make: Callable[[], Sequence[Delivery]], export: str) -> None:
        try:
            made = make()
        except Exception:  # a fault in the making of an event must not keep its export from going on
            log.exception(f"no event can be made for a change of {export}")
            return
        now = time.time()
        rows = [
            {
                "receiver": one.receiver,
                "id": one.id,
                "type": one.type,
                "export": one.export,
                "export_create_time": one.export_create_time,
                "revision": one.revision,
                "create_time": now,
                "body": one.body,
            }
            for one in made
        ]
        with self._transactions.begin() as connection:
            for row in rows:
                connection.execute(_ADD, row)

    # For the sender

    def find_due(self, receiver: str, *, now: float, most: int, least_tried: bool = False) -> list[Delivery]:
        """Return deliveries of a receiver that may be tried now: of each export its oldest one alone.

        Args:
            receiver: Its name.
            now: The present time.
            most: How many at most.
            least_tried: Begin with those that were tried least, not with those that are due for longest.
        """
        query = _LEAST_TRIED if least_tried else _LONGEST_DUE
        given = {"receiver": receiver, "now": now, "latest": now + _LONGEST_WAIT, "most": most}
        with self._transactions.begin() as connection:
            return [Delivery(**row) for row in connection.execute(query, given).mappings()]

    def remove(self, receiver: str, delivery_id: str) -> None:
        """Remove a delivery that has arrived, or that the receiver does not want."""
        query = sa.delete(_deliveries).where(*_is(receiver, delivery_id)).returning(_deliveries.c.export)
        with self._transactions.begin() as connection:
            export = connection.execute(query).scalar()
            if export is not None:
                connection.execute(_ADVANCE, {"receiver": receiver, "export": export})

    def postpone(self, receiver: str, delivery_id: str, *, until: float) -> None:
        """Note an attempt that failed, and the time of the next one."""
        query = sa.update(_deliveries).where(*_is(receiver, delivery_id))
        with self._transactions.begin() as connection:
            connection.execute(query.values(attempts=_deliveries.c.attempts + 1, due_time=until))

    def hasten(self, receiver: str, *, now: float, most_tried: int) -> int:
        """Make deliveries of a receiver due, because it takes events again: the oldest first, as when they were stored.

        Args:
            receiver: Its name.
            now: The present time.
            most_tried: How often one may have been tried; what failed more often is the event's own fault, and keeps its pause.

        Returns:
            How many these were; if :data:`BATCH`, there may be more.
        """
        given = {"receiver": receiver, "now": now, "most_tried": most_tried, "most": BATCH}
        with self._transactions.begin() as connection:
            return connection.execute(_HASTEN, given).rowcount

    def give_up(
        self,
        receiver: str,
        *,
        before: float | None = None,
        untried: bool = False,
        spare: Collection[str] = (),
        most: int = BATCH,
    ) -> list[Delivery]:
        """Remove the oldest deliveries of a receiver; return them, without their bodies.

        Args:
            receiver: Its name.
            before: Only those stored before this time.
            untried: Whether to remove also those that were never tried.
            spare: Ids of those to keep.
            most: How many at most.
        """
        conditions = [_deliveries.c.receiver == receiver]
        conditions += [] if before is None else [_deliveries.c.create_time < before]
        conditions += [] if untried else [_deliveries.c.attempts >= 1]
        conditions += [_deliveries.c.id.not_in(sorted(spare))] if spare else []
        oldest = sa.select(_deliveries.c.id).where(*conditions).order_by(_deliveries.c.create_time).limit(most)
        query = sa.delete(_deliveries).where(_deliveries.c.receiver == receiver, _deliveries.c.id.in_(oldest))
        returned = [column for column in _deliveries.c if column.name not in {"body", "due_time", "is_next"}]
        with self._transactions.begin() as connection:
            lost = [Delivery(**row, body="") for row in connection.execute(query.returning(*returned)).mappings()]
            for export in sorted({one.export for one in lost}):
                connection.execute(_ADVANCE, {"receiver": receiver, "export": export})
        return lost

    def count_waiting(self) -> dict[str, Waiting]:
        """Return how many deliveries wait, by receiver."""
        columns = _deliveries.c.receiver, sa.func.count(), sa.func.min(_deliveries.c.create_time)
        with self._transactions.begin() as connection:
            rows = connection.execute(sa.select(*columns).group_by(_deliveries.c.receiver)).all()
        return {receiver: Waiting(number, oldest) for receiver, number, oldest in rows}


def _is(receiver: str, delivery_id: str) -> tuple[Any, Any]:
    return _deliveries.c.receiver == receiver, _deliveries.c.id == delivery_id
