"""Numbered migrations of the coordinator's tables, each applied once and as a whole, forward only.

SQLite and PostgreSQL run the same SQL. A migration is never changed after a release: add a new one instead. None uses
:mod:`slipway_coordinator.storage.schema` or the classes of records, because those will change and a migration must not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from slipway.errors import ServiceError

_versions = sa.Table(
    "slipway_schema",
    sa.MetaData(),  # never changes: it exists before the first migration
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("applied_time", sa.Double, nullable=False),
)


def _first(connection: sa.Connection) -> None:
    _run(
        connection,
        """CREATE TABLE IF NOT EXISTS slipway_exports (
            name VARCHAR(300) PRIMARY KEY, project VARCHAR(100) NOT NULL, create_time DOUBLE PRECISION NOT NULL,
            ended BOOLEAN NOT NULL, revision INTEGER NOT NULL, sequence_limit BIGINT NOT NULL, record TEXT NOT NULL)""",
        "CREATE INDEX IF NOT EXISTS ix_slipway_exports_project ON slipway_exports (project)",
        "CREATE INDEX IF NOT EXISTS ix_slipway_exports_ended ON slipway_exports (ended)",
        """CREATE TABLE IF NOT EXISTS slipway_leases (
            task VARCHAR(500) PRIMARY KEY, export VARCHAR(300) NOT NULL, epoch BIGINT NOT NULL,
            worker VARCHAR(200) NOT NULL, state VARCHAR(20) NOT NULL)""",
        "CREATE INDEX IF NOT EXISTS ix_slipway_leases_export ON slipway_leases (export)",
    )


def _history(connection: sa.Connection) -> None:
    _run(
        connection,
        "ALTER TABLE slipway_exports ADD COLUMN state VARCHAR(20) NOT NULL DEFAULT 'queued'",
        "ALTER TABLE slipway_exports ADD COLUMN end_time DOUBLE PRECISION",
        "ALTER TABLE slipway_exports ADD COLUMN request_id VARCHAR(64)",
        "CREATE UNIQUE INDEX ux_slipway_exports_request ON slipway_exports (project, request_id)",
        "CREATE INDEX ix_slipway_exports_page ON slipway_exports (project, create_time, name)",
        """CREATE TABLE slipway_labels (
            export VARCHAR(300) NOT NULL, name VARCHAR(100) NOT NULL, value TEXT NOT NULL, PRIMARY KEY (export, name))""",
        "CREATE INDEX ix_slipway_labels_value ON slipway_labels (name, value)",
    )
    for name, text in connection.execute(sa.text("SELECT name, record FROM slipway_exports")).all():
        record = json.loads(text)
        update = sa.text("UPDATE slipway_exports SET state = :state, end_time = :end_time WHERE name = :name")
        connection.execute(update, {"state": record["state"], "end_time": record["end_time"], "name": name})
        rows = [{"export": name, "name": key, "value": value} for key, value in record["labels"].items()]
        _insert(connection, "INSERT INTO slipway_labels (export, name, value) VALUES (:export, :name, :value)", rows)


def _ownership(connection: sa.Connection) -> None:
    _run(
        connection,
        """CREATE TABLE slipway_artifacts (
            project VARCHAR(100) NOT NULL, digest VARCHAR(80) NOT NULL, export VARCHAR(300) NOT NULL,
            create_time DOUBLE PRECISION NOT NULL, PRIMARY KEY (project, digest, export))""",
        "CREATE INDEX ix_slipway_artifacts_digest ON slipway_artifacts (digest)",
        "CREATE INDEX ix_slipway_artifacts_export ON slipway_artifacts (export)",
        """CREATE TABLE slipway_blobs (
            project VARCHAR(100) NOT NULL, digest VARCHAR(80) NOT NULL, create_time DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (project, digest))""",
        "CREATE INDEX ix_slipway_blobs_time ON slipway_blobs (create_time)",
    )
    for name, project, time_, text in connection.execute(
        sa.text("SELECT name, project, create_time, record FROM slipway_exports")
    ).all():
        record = json.loads(text)
        digests = {*record["sources"].values()}.union(*(task["outputs"].values() for task in record["tasks"]))
        rows = [{"project": project, "digest": d, "export": name, "create_time": time_} for d in sorted(digests)]
        columns = "(project, digest, export, create_time) VALUES (:project, :digest, :export, :create_time)"
        _insert(connection, f"INSERT INTO slipway_artifacts {columns}", rows)


def _events(connection: sa.Connection) -> None:
    _run(
        connection,
        "ALTER TABLE slipway_exports ADD COLUMN run INTEGER NOT NULL DEFAULT 1",
        """CREATE TABLE slipway_events (
            export VARCHAR(300) NOT NULL, run INTEGER NOT NULL, number INTEGER NOT NULL,
            key VARCHAR(600) NOT NULL UNIQUE, event TEXT NOT NULL, PRIMARY KEY (export, run, number))""",
    )
    for name, text in connection.execute(sa.text("SELECT name, record FROM slipway_exports")).all():
        run = json.loads(text).get("run", 1)
        connection.execute(
            sa.text("UPDATE slipway_exports SET run = :run WHERE name = :name"), {"run": run, "name": name}
        )


def _epochs(connection: sa.Connection) -> None:
    _run(
        connection,
        "CREATE TABLE slipway_epochs (highest BIGINT NOT NULL)",
        "INSERT INTO slipway_epochs (highest) SELECT COALESCE(MAX(epoch), 0) FROM slipway_leases",
    )


def _creator(connection: sa.Connection) -> None:
    _run(connection, "ALTER TABLE slipway_exports ADD COLUMN creator VARCHAR(100) NOT NULL DEFAULT ''")


def _deliveries(connection: sa.Connection) -> None:
    _run(
        connection,
        """CREATE TABLE slipway_deliveries (
            receiver VARCHAR(100) NOT NULL, id VARCHAR(64) NOT NULL, type VARCHAR(60) NOT NULL, export VARCHAR(300) NOT NULL,
            export_create_time DOUBLE PRECISION NOT NULL, revision INTEGER NOT NULL, create_time DOUBLE PRECISION NOT NULL,
            attempts INTEGER NOT NULL, due_time DOUBLE PRECISION NOT NULL, is_next BOOLEAN NOT NULL, body TEXT NOT NULL,
            PRIMARY KEY (receiver, id))""",
        """CREATE INDEX ix_slipway_deliveries_order
            ON slipway_deliveries (receiver, export, export_create_time, revision)""",
        "CREATE INDEX ix_slipway_deliveries_due ON slipway_deliveries (receiver, is_next, due_time)",
        "CREATE INDEX ix_slipway_deliveries_tried ON slipway_deliveries (receiver, is_next, attempts, due_time)",
        "CREATE INDEX ix_slipway_deliveries_age ON slipway_deliveries (receiver, create_time, attempts)",
    )


def _changes(connection: sa.Connection) -> None:
    _run(
        connection,
        """CREATE TABLE slipway_changes (
            sequence BIGINT PRIMARY KEY, time DOUBLE PRECISION NOT NULL, project VARCHAR(100) NOT NULL, change TEXT NOT NULL)""",
        "CREATE INDEX ix_slipway_changes_project ON slipway_changes (project, sequence)",
    )


def _usage(connection: sa.Connection) -> None:
    _run(
        connection,
        "ALTER TABLE slipway_leases ADD COLUMN gpus DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE slipway_leases ADD COLUMN since DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE slipway_epochs ADD COLUMN alive_time DOUBLE PRECISION NOT NULL DEFAULT 0",
        "CREATE INDEX ix_slipway_leases_gpus ON slipway_leases (gpus) WHERE gpus > 0",
        """CREATE TABLE slipway_gpu_seconds (
            project VARCHAR(100) NOT NULL, day INTEGER NOT NULL, seconds DOUBLE PRECISION NOT NULL, PRIMARY KEY (project, day))""",
        "CREATE TABLE slipway_measurements (artifact VARCHAR(80) PRIMARY KEY, state VARCHAR(20) NOT NULL)",
        "CREATE INDEX ix_slipway_measurements_unknown ON slipway_measurements (artifact) WHERE state = 'unknown'",
        """CREATE TABLE slipway_contents (
            artifact VARCHAR(80) NOT NULL, digest VARCHAR(80) NOT NULL, size_bytes BIGINT NOT NULL, PRIMARY KEY (artifact, digest))""",
        """CREATE TABLE slipway_stored (
            project VARCHAR(100) NOT NULL, digest VARCHAR(80) NOT NULL, size_bytes BIGINT NOT NULL,
            artifacts INTEGER NOT NULL, PRIMARY KEY (project, digest))""",
        "CREATE TABLE slipway_usage (project VARCHAR(100) PRIMARY KEY, stored_bytes BIGINT NOT NULL)",
        "ALTER TABLE slipway_blobs ADD COLUMN size_bytes BIGINT NOT NULL DEFAULT 0",
        "CREATE INDEX ix_slipway_blobs_sizes ON slipway_blobs (project) WHERE size_bytes > 0",
        "INSERT INTO slipway_measurements (artifact, state) SELECT DISTINCT digest, 'unknown' FROM slipway_artifacts",
    )


def _summaries(connection: sa.Connection) -> None:
    _run(
        connection,
        "ALTER TABLE slipway_exports ADD COLUMN summary TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE slipway_exports ADD COLUMN shape VARCHAR(16) NOT NULL DEFAULT ''",
    )


def _newest(connection: sa.Connection) -> None:
    _run(connection, "CREATE INDEX ix_slipway_exports_newest ON slipway_exports (create_time DESC, name)")


MIGRATIONS: Sequence[Callable[[sa.Connection], None]] = (
    *(_first, _history, _ownership, _events, _epochs, _creator),
    *(_deliveries, _changes, _usage, _summaries, _newest),
)


def migrate(engine: sa.Engine, migrations: Sequence[Callable[[sa.Connection], None]] = MIGRATIONS) -> int:
    """Apply the missing migrations in one transaction, one process at a time; return how many there were."""
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver would begin after the first change of a table
        else:
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtext('slipway_schema'))"))
        _versions.create(connection, checkfirst=True)
        applied = _version(connection)
        for number, migration in enumerate(migrations[applied:], start=applied + 1):
            migration(connection)
            connection.execute(sa.insert(_versions).values(version=number, applied_time=time.time()))
    return max(len(migrations) - applied, 0)


def check(engine: sa.Engine) -> None:
    """Check that the tables have this program's version.

    Raises:
        ServiceError: reason ``STATE_SCHEMA``.
    """
    with engine.connect() as connection:
        there = sa.inspect(connection).has_table(_versions.name)
        version = _version(connection) if there else 0
    if version == len(MIGRATIONS):
        return
    older = version < len(MIGRATIONS)
    raise ServiceError(
        f"the state's tables have version {version}, this program needs {len(MIGRATIONS)}",
        reason="STATE_SCHEMA",
        remedy="run slipway coordinator migrate --state …" if older else "run the newer program",
        about={"version": version, "needed": len(MIGRATIONS)},
    )


def _version(connection: sa.Connection) -> int:
    return connection.execute(sa.select(sa.func.coalesce(sa.func.max(_versions.c.version), 0))).scalar_one()


def _run(connection: sa.Connection, *statements: str) -> None:
    for statement in statements:
        connection.execute(sa.text(statement))


def _insert(connection: sa.Connection, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(sa.text(statement), rows)
