"""What the coordinator keeps beside its workflows: the read model of exports, leases, and event sequence numbers.

Plain tables in the same database as the workflows' own, through SQLAlchemy, so SQLite and PostgreSQL take the same code.
All calls block for a few milliseconds; services run them in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from slipway_coordinator.records import ExportRecord

SEQUENCE_BLOCK = 10_000

_metadata = sa.MetaData()

_exports = sa.Table(
    "slipway_exports",
    _metadata,
    sa.Column("name", sa.String(300), primary_key=True),
    sa.Column("project", sa.String(100), nullable=False, index=True),
    sa.Column("create_time", sa.Float, nullable=False),
    sa.Column("ended", sa.Boolean, nullable=False, index=True),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("sequence_limit", sa.BigInteger, nullable=False, default=0),
    sa.Column("record", sa.Text, nullable=False),
)

_leases = sa.Table(
    "slipway_leases",
    _metadata,
    sa.Column("task", sa.String(500), primary_key=True),
    sa.Column("export", sa.String(300), nullable=False, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("worker", sa.String(200), nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
)


class LeaseState(StrEnum):
    """Where a lease is. A HELD one may be renewed, an EXPIRED one taken up again by its owner; a RETURNED one is free for
    everybody, its owner having given it up; an ENDED one has its result.
    """

    HELD = "held"
    EXPIRED = "expired"
    RETURNED = "returned"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Durable part of a lease."""

    task: str
    export: str
    epoch: int
    worker: str
    state: LeaseState


class Database:
    """Tables of the coordinator; call :meth:`prepare` first. Safe for several threads of one process.

    Args:
        url: SQLAlchemy URL; for SQLite ``sqlite:///FILE``.
    """

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url)
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)

    def prepare(self) -> None:
        """Create the tables that are not there yet."""
        _metadata.create_all(self._engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # Exports

    def insert(self, record: ExportRecord) -> bool:
        """Store a new export; False when there is one of this name already."""
        row = {
            "name": record.name,
            "project": _project(record.name),
            "create_time": record.create_time,
            "ended": record.state.ended,
            "revision": record.revision,
            "sequence_limit": 0,
            "record": _dumps(record),
        }
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(_exports).values(row))
        except sa.exc.IntegrityError:
            return False
        return True

    def save(self, record: ExportRecord) -> bool:
        """Store a newer revision of an export; False, and nothing changed, when the stored one is newer or gone."""
        with self._engine.begin() as connection:
            result = connection.execute(
                sa.update(_exports)
                .where(_exports.c.name == record.name, _exports.c.revision < record.revision)
                .values(record=_dumps(record), revision=record.revision, ended=record.state.ended)
            )
            if result.rowcount:
                return True
            stored = connection.execute(sa.select(_exports.c.revision).where(_exports.c.name == record.name)).scalar()
        return stored == record.revision

    def get(self, name: str) -> ExportRecord | None:
        """The export of this name."""
        with self._engine.connect() as connection:
            found = connection.execute(sa.select(_exports.c.record).where(_exports.c.name == name)).scalar()
        return None if found is None else ExportRecord.from_json(json.loads(found))

    def page(self, project: str, *, limit: int, offset: int) -> list[ExportRecord]:
        """Exports of a project, newest first."""
        query = (
            sa.select(_exports.c.record)
            .where(_exports.c.project == project)
            .order_by(_exports.c.create_time.desc(), _exports.c.name)
            .limit(limit)
            .offset(offset)
        )
        with self._engine.connect() as connection:
            return [ExportRecord.from_json(json.loads(text)) for text in connection.execute(query).scalars()]

    def unended(self) -> list[ExportRecord]:
        """Exports that a coordinator has to go on with, oldest first."""
        query = sa.select(_exports.c.record).where(_exports.c.ended.is_(False)).order_by(_exports.c.create_time)
        with self._engine.connect() as connection:
            return [ExportRecord.from_json(json.loads(text)) for text in connection.execute(query).scalars()]

    def delete(self, name: str) -> None:
        """Forget an export and its leases."""
        with self._engine.begin() as connection:
            connection.execute(sa.delete(_exports).where(_exports.c.name == name))
            connection.execute(sa.delete(_leases).where(_leases.c.export == name))

    def reserve_sequences(self, name: str) -> int:
        """Reserve the next :data:`SEQUENCE_BLOCK` event numbers of an export; returns the number before the first.

        Reserved numbers are never given again, so the numbers a client has seen stay meaningful over a restart.
        """
        with self._engine.begin() as connection:
            update = (
                sa.update(_exports)
                .where(_exports.c.name == name)
                .values(sequence_limit=_exports.c.sequence_limit + SEQUENCE_BLOCK)
            )
            connection.execute(update)
            limit = connection.execute(sa.select(_exports.c.sequence_limit).where(_exports.c.name == name)).scalar()
        return (limit or SEQUENCE_BLOCK) - SEQUENCE_BLOCK

    # Leases

    def lease(self, task: str) -> LeaseRow | None:
        """The lease of an attempt, if it was ever leased."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(_leases).where(_leases.c.task == task)).mappings().first()
        return None if row is None else _lease_row(row)

    def grant(self, task: str, *, export: str, worker: str) -> int:
        """Lease an attempt to a worker; returns the epoch, which grows with every grant."""
        values = {"export": export, "worker": worker, "state": LeaseState.HELD.value}
        with self._engine.begin() as connection:
            updated = connection.execute(
                sa.update(_leases).where(_leases.c.task == task).values(epoch=_leases.c.epoch + 1, **values)
            )
            if not updated.rowcount:
                connection.execute(sa.insert(_leases).values(task=task, epoch=1, **values))
            epoch = connection.execute(sa.select(_leases.c.epoch).where(_leases.c.task == task)).scalar()
        assert epoch is not None
        return epoch

    def set_lease_state(self, task: str, state: LeaseState) -> None:
        """Change the state of a lease that exists."""
        with self._engine.begin() as connection:
            connection.execute(sa.update(_leases).where(_leases.c.task == task).values(state=state.value))

    def end_leases(self, export: str, *, keep: Iterable[str]) -> None:
        """End all leases of an export except those of the attempts to keep."""
        query = sa.update(_leases).where(_leases.c.export == export, _leases.c.task.not_in(list(keep)))
        with self._engine.begin() as connection:
            connection.execute(query.values(state=LeaseState.ENDED.value))

    def expire_all_leases(self) -> None:
        """Mark every held lease as expired: its worker is known to be gone."""
        query = sa.update(_leases).where(_leases.c.state == LeaseState.HELD.value)
        with self._engine.begin() as connection:
            connection.execute(query.values(state=LeaseState.EXPIRED.value))


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # Write-ahead logging lets readers and the one writer go on side by side; it is a property of the file.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA busy_timeout=30000")
    connection.execute("PRAGMA synchronous=FULL")


def _project(name: str) -> str:
    return name.split("/")[1]


def _dumps(record: ExportRecord) -> str:
    return json.dumps(record.to_json(), separators=(",", ":"), ensure_ascii=False)


def _lease_row(row: Any) -> LeaseRow:
    return LeaseRow(
        task=row["task"],
        export=row["export"],
        epoch=row["epoch"],
        worker=row["worker"],
        state=LeaseState(row["state"]),
    )
