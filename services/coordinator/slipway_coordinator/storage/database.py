"""The coordinator's tables: exports, leases, event numbers, and what projects have.

They are in the same database as the workflows' own. SQLAlchemy lets the same code use SQLite and PostgreSQL. All calls block for
a few milliseconds; services run them in a thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import pydantic
import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway_coordinator.lifecycle.quotas import ProjectUsage
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.lifecycle.summaries import ExportSummary, record_shape, summary_text
from slipway_coordinator.storage import migrations, schema
from slipway_coordinator.storage.changes import Changes
from slipway_coordinator.storage.deliveries import Announcer, Deliveries
from slipway_coordinator.storage.events import SEQUENCE_BLOCK
from slipway_coordinator.storage.inbox import Events
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.leases import Leases
from slipway_coordinator.storage.projects.gpu_seconds import GpuSeconds
from slipway_coordinator.storage.projects.ownership import Ownership
from slipway_coordinator.storage.projects.stored_bytes import UPLOAD_SECONDS, StoredBytes
from slipway_coordinator.storage.schema import events as _events
from slipway_coordinator.storage.schema import exports as _exports
from slipway_coordinator.storage.schema import labels as _labels

# A transaction of a coordinator that froze, or lost its network, would keep its rows locked for hours: PostgreSQL ends it after
# this time. Ours never pause, because they do nothing but run their statements.
IDLE_SECONDS = 10

# Statements run for every export are text, because building an expression takes longer than running it.
_INSERT = sa.text("""
    INSERT INTO slipway_exports
        (name, project, create_time, request_id, creator, sequence_limit,
         state, ended, end_time, revision, run, record, summary, shape)
    VALUES (:name, :project, :create_time, :request_id, :creator, 0,
            :state, :ended, :end_time, :revision, :run, :record, :summary, :shape)
    ON CONFLICT DO NOTHING
""")
_SAVE = sa.text("""
    UPDATE slipway_exports
    SET state = :state, ended = :ended, end_time = :end_time, revision = :revision, run = :run,
        record = :record, summary = :summary, shape = :shape
    WHERE name = :name AND revision < :revision
""")
_UNENDED = sa.text("SELECT name, run FROM slipway_exports WHERE NOT ended ORDER BY create_time")
_OTHER_SHAPE = sa.text("SELECT record FROM slipway_exports WHERE NOT ended AND shape <> :shape")
_WHOLE = " "  # before a record among summaries
_PROJECTS = sa.text("""
    SELECT project FROM slipway_exports
    UNION SELECT project FROM slipway_usage WHERE stored_bytes <> 0
    UNION SELECT project FROM slipway_blobs WHERE size_bytes > 0 AND create_time >= :since
    UNION SELECT project FROM slipway_gpu_seconds WHERE day >= :first
    UNION SELECT a.project FROM slipway_measurements m CROSS JOIN slipway_artifacts a
        WHERE m.state = 'unknown' AND a.digest = m.artifact
""")


class Database:
    """Tables of the coordinator; call :meth:`prepare` first. Safe for several threads of one process.

    Args:
        url: SQLAlchemy URL; for SQLite ``sqlite:///FILE``.
        announcer: Makes the deliveries to receivers of webhooks; None if there are none.

    Attributes:
        transactions: The transactions of all calls.
        gpu_seconds: The table of projects' GPU seconds.
        stored_bytes: The tables of projects' stored bytes.
        leases: The table of leases.
        events: The table of events.
        changes: The table of changes of exports, for watchers of whole projects.
        deliveries: The table of deliveries to receivers of webhooks.
        ownership: The tables of projects' artifacts.
    """

    def __init__(self, url: str, *, announcer: Announcer | None = None) -> None:
        self._engine = sa.create_engine(url)
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
        else:
            sa.event.listen(self._engine, "connect", _prepare_postgres)
        self.transactions = Transactions(self._engine)
        self.gpu_seconds = GpuSeconds(self.transactions)
        self.stored_bytes = StoredBytes(self.transactions)
        self.leases = Leases(self.transactions, self.gpu_seconds)
        self.events = Events(self.transactions)
        self.changes = Changes(self.transactions)
        self.deliveries = Deliveries(self.transactions, announcer)
        self.ownership = Ownership(self.transactions, self.stored_bytes)

    def prepare(self) -> None:
        """Migrate the tables of a SQLite file; on PostgreSQL, check that they are up to date and writable.

        Raises:
            ServiceError: reason ``STATE_SCHEMA``.
            sqlalchemy.exc.DBAPIError: The tables cannot be read or changed.
        """
        if self._engine.dialect.name == "sqlite":
            migrations.migrate(self._engine)
        migrations.check(self._engine)
        if self._engine.dialect.name != "sqlite":
            with self._engine.begin() as connection:
                for table in schema.metadata.sorted_tables:
                    _change_nothing(connection, table)

    def ping(self) -> None:
        """Check that the database responds."""
        with self._engine.connect() as connection:
            connection.execute(sa.select(1))

    def migrate(self) -> int:
        """Bring the tables up to date; return how many migrations that took."""
        return migrations.migrate(self._engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def insert(self, record: ExportRecord) -> bool:
        """Store a new export; return False if this name or request already has one."""
        row = {
            "name": record.name,
            "project": record.project,
            "create_time": record.create_time,
            "request_id": record.request_id or None,
            "creator": record.creator,
            **_revision_columns(record),
        }
        with self.transactions.begin() as connection:
            if not connection.execute(_INSERT, row).rowcount:
                return False
            _note_labels(connection, record)
            self.ownership.note(record.name, record.sources.values(), project=record.project)
            self.changes.note_creation(record)
            self.deliveries.note_change(None, record)
        return True

    def save(
        self, record: ExportRecord, *, before: ExportRecord | None = None, state_before: ExportState | None = None
    ) -> bool:
        """Store a newer revision of an export; return False, and change nothing, if the stored one is newer or gone.

        Args:
            record: The new revision.
            before: An earlier stored revision; its results are already noted as the project's.
            state_before: State of the revision before, if ``before`` is None; by default it is read.
        """
        made = record.results - (before.results if before is not None else set())
        with self.transactions.begin() as connection:
            known = before.state if before is not None else state_before or self.changes.read_state(record.name)
            if connection.execute(_SAVE, {"name": record.name, **_revision_columns(record)}).rowcount:
                self.changes.note_state(known, record)
                self.deliveries.note_change(known, record)
                self.ownership.note(record.name, made, project=record.project)
                if before is not None and before.labels != record.labels:
                    connection.execute(sa.delete(_labels).where(_labels.c.export == record.name))
                    _note_labels(connection, record)
                return True
            stored = connection.execute(sa.select(_exports.c.revision).where(_exports.c.name == record.name)).scalar()
        return stored == record.revision

    def get(self, name: str) -> ExportRecord | None:
        """Return the export with this name."""
        return self._one(_exports.c.name == name)

    def of_request(self, project: str, request_id: str) -> ExportRecord | None:
        """Return the export that a request made."""
        return self._one(_exports.c.project == project, _exports.c.request_id == request_id)

    def page(
        self,
        conditions: Sequence[sa.ColumnElement[bool]],
        *,
        limit: int,
        after: tuple[float, str] | None = None,
        oldest_first: bool = False,
    ) -> list[ExportRecord]:
        """Return exports that meet all conditions, newest first unless ``oldest_first``; those of one time by name.

        Args:
            conditions: On the table of exports; see :mod:`slipway_coordinator.storage.filters`.
            limit: How many at most.
            after: Creation time and name of the last one of the page before.
            oldest_first: Whether the order of times is the other way round.
        """
        return [_record(text) for text in self._page(_exports.c.record, conditions, limit, after, oldest_first)]

    def summaries(
        self,
        conditions: Sequence[sa.ColumnElement[bool]],
        *,
        limit: int,
        after: tuple[float, str] | None = None,
        oldest_first: bool = False,
    ) -> list[ExportSummary]:
        """Return the summaries of the exports that :meth:`page` returns.

        A row has no shape if the last program that wrote it knows no summaries. It may have run on after the migration, so what such a
        row has as its summary says nothing: the record is read. Once a program has written a shape, no such program runs on these tables.
        """
        column = sa.case((_exports.c.shape == "", _WHOLE + _exports.c.record), else_=_exports.c.summary)
        texts = self._page(column, conditions, limit, after, oldest_first)
        return [_summary(text) for text in texts]

    def _page(
        self,
        column: sa.ColumnElement[str],
        conditions: Sequence[sa.ColumnElement[bool]],
        limit: int,
        after: tuple[float, str] | None,
        oldest_first: bool,
    ) -> Sequence[str]:
        query = sa.select(column).where(*conditions)
        if after is not None:
            created, name = after
            later = _exports.c.create_time > created if oldest_first else _exports.c.create_time < created
            query = query.where(later | ((_exports.c.create_time == created) & (_exports.c.name > name)))
        first = _exports.c.create_time if oldest_first else _exports.c.create_time.desc()
        return self._texts(query.order_by(first, _exports.c.name).limit(limit))

    def unended_runs(self) -> dict[str, int]:
        """Return the run of each export that has not ended, by name, oldest first.

        Records that a program with other records wrote are parsed (a quarter of a millisecond each), so that an older program ends before
        it changes an export of a newer one.

        Raises:
            ServiceError: reason ``STATE_SCHEMA`` when this program does not understand one of them.
        """
        with self._engine.connect() as connection:
            for text in connection.execute(_OTHER_SHAPE, {"shape": record_shape()}).scalars():
                _record(text)
            return {row.name: row.run for row in connection.execute(_UNENDED)}

    def find_ended_before(self, end: float, *, limit: int) -> list[ExportRecord]:
        """Return exports that ended before a time, oldest first."""
        query = sa.select(_exports.c.record).where(_exports.c.ended.is_(True), _exports.c.end_time < end)
        return self._all(query.order_by(_exports.c.end_time).limit(limit))

    def delete(self, name: str) -> None:
        """Forget an export and its leases."""
        with self.transactions.begin() as connection:
            self.changes.note_deletion(name)
            self.deliveries.note_deletion(name)
            connection.execute(sa.delete(_exports).where(_exports.c.name == name))
            connection.execute(sa.delete(_labels).where(_labels.c.export == name))
            self.leases.forget(name)
            connection.execute(sa.delete(_events).where(_events.c.export == name))
            self.ownership.forget(name)

    def usage_of(self, projects: Collection[str]) -> dict[str, ProjectUsage]:
        """Return what some projects use: what others use is not read."""
        with self.transactions.begin():
            stored, seconds = self.stored_bytes.of_each(projects), self.gpu_seconds.of_each(projects)
            unmeasured = self.stored_bytes.unmeasured_by_project()
        return {
            name: ProjectUsage(stored.get(name, 0), unmeasured.get(name, 0), seconds.get(name, 0.0))
            for name in projects
        }

    def find_projects(self) -> set[str]:
        """Return the names of all projects that have exports or use anything."""
        window = {"since": time.time() - UPLOAD_SECONDS, "first": self.gpu_seconds.first_day()}
        with self.transactions.begin() as connection:
            return set(connection.execute(_PROJECTS, window).scalars())

    def usage(self) -> dict[str, ProjectUsage]:
        """Return what each project uses that uses anything."""
        with self.transactions.begin():
            stored, seconds = self.stored_bytes.by_project(), self.gpu_seconds.by_project()
            unmeasured = self.stored_bytes.unmeasured_by_project()
        return {
            name: ProjectUsage(stored.get(name, 0), unmeasured.get(name, 0), seconds.get(name, 0.0))
            for name in {*stored, *seconds, *unmeasured}
        }

    def reserve_sequences(self, name: str) -> int:
        """Reserve the next :data:`~slipway_coordinator.storage.events.SEQUENCE_BLOCK` event numbers of an export; return the number before the first.

        A number is never reserved twice, so the numbers that a client has seen stay valid after a restart.
        """
        with self.transactions.begin() as connection:
            limit = connection.execute(
                sa.update(_exports)
                .where(_exports.c.name == name)
                .values(sequence_limit=_exports.c.sequence_limit + SEQUENCE_BLOCK)
                .returning(_exports.c.sequence_limit)
            ).scalar()
        return (limit or SEQUENCE_BLOCK) - SEQUENCE_BLOCK

    def _one(self, *conditions: sa.ColumnElement[bool]) -> ExportRecord | None:
        records = self._all(sa.select(_exports.c.record).where(*conditions))
        return records[0] if records else None

    def _all(self, query: sa.Select[Any]) -> list[ExportRecord]:
        return [_record(text) for text in self._texts(query)]

    def _texts(self, query: sa.Select[Any]) -> Sequence[str]:
        with self._engine.connect() as connection:
            return connection.execute(query).scalars().all()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # Write-ahead logging lets readers and the one writer work side by side; it is a property of the file.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA busy_timeout=30000")
    connection.execute("PRAGMA synchronous=FULL")


def _prepare_postgres(connection: Any, _record: Any) -> None:
    connection.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'")
    connection.commit()


def _change_nothing(connection: sa.Connection, table: sa.Table) -> None:
    """Run no-op writes now, so that a read-only role or replica fails here and not later."""
    columns, none = list(table.columns), sa.false()
    connection.execute(sa.insert(table).from_select(columns, sa.select(table).where(none)))
    connection.execute(sa.update(table).where(none).values({columns[0]: columns[0]}))
    connection.execute(sa.delete(table).where(none))


def _record(text: str) -> ExportRecord:
    """Read a stored export.

    Raises:
        ServiceError: reason ``STATE_SCHEMA`` when this program does not understand it.
    """
    try:
        return ExportRecord.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise _strange_record_error(text, error.errors()[0]["msg"]) from error


def _summary(text: str) -> ExportSummary:
    """Read the summary of a stored export, or make it of the record, which is marked.

    Raises:
        ServiceError: as for :func:`_record`.
    """
    if text.startswith(_WHOLE):
        return ExportSummary.of(_record(text.removeprefix(_WHOLE)))
    try:
        return ExportSummary.parse(text)
    except (ValueError, TypeError) as error:
        raise _strange_record_error(text, str(error)) from error


def _strange_record_error(text: str, why: str) -> ServiceError:
    name = re.search(r'"name":\s*"([^"]{1,300})"', text)
    return ServiceError(
        f"the stored export {name[1] if name else ''} is not one of this version: {why}",
        reason="STATE_SCHEMA",
        remedy="run the newer program, which wrote it",
    )


def _revision_columns(record: ExportRecord) -> dict[str, Any]:
    """Return the columns that change with every revision."""
    return {
        "state": record.state.value,
        "ended": record.state.ended,
        "end_time": record.end_time,
        "revision": record.revision,
        "run": record.run,
        "record": record.model_dump_json(),
        "summary": summary_text(record),
        "shape": record_shape(),
    }


def _note_labels(connection: sa.Connection, record: ExportRecord) -> None:
    if record.labels:
        rows = [{"export": record.name, "name": name, "value": value} for name, value in record.labels.items()]
        connection.execute(sa.insert(_labels), rows)
