"""From the tables of any version to those the program uses, in SQLite and a real PostgreSQL; never back."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from slipway.errors import ModelExportError
from slipway_coordinator.server import migrate
from slipway_coordinator.storage import migrations, schema
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import state_at
from slipway_coordinator.storage.migrations import MIGRATIONS
from support.servers.postgres_server import PostgresServer

BASE, MADE = (f"sha256:{digit * 64}" for digit in "ab")
OLD = "projects/default/exports/old"
# What the first version wrote, as far as migrations look at it.
RECORD: dict[str, Any] = {
    "name": OLD,
    "state": "failed",
    "end_time": 2.5,
    "labels": {"team": "speech", "n": "1"},
    "sources": {"base": BASE},
    "tasks": [{"outputs": {"gguf": MADE}, "format": "gguf", "state": "succeeded"}, {"outputs": {}}],
    "run": 3,
}
FIRST_ROW = (
    "INSERT INTO slipway_exports (name, project, create_time, ended, revision, sequence_limit, record)"
    " VALUES (:name, 'default', 1.5, true, 7, 10000, :record)"
)


@pytest.fixture
def engine(place: str) -> Iterator[sa.Engine]:
    """An empty state of either kind."""
    engine = sa.create_engine(state_at(place).url)
    yield engine
    engine.dispose()


def tables(engine: sa.Engine) -> dict[str, Any]:
    """All that the database itself says of our tables, whatever the order in which it came to be."""
    inspector = sa.inspect(engine)
    names = [name for name in inspector.get_table_names() if name != "slipway_schema"]
    return {name: _table(inspector, name) for name in names}


def _table(inspector: sa.Inspector, name: str) -> dict[str, Any]:
    key = inspector.get_pk_constraint(name)["constrained_columns"]
    indexes = inspector.get_indexes(name, include_auto_indexes=True)  # those of unique columns too
    columns = {}
    for one in inspector.get_columns(name):
        nullable = one["nullable"] and one["name"] not in key  # SQLite calls a key's columns nullable
        default = (one["default"] or "").partition("::")[0].strip("'")  # PostgreSQL adds a cast
        columns[one["name"]] = (_type(one["type"]), nullable, default)
    return {
        "columns": columns,
        "key": key,
        "indexes": sorted((_given(str(one["name"])), one["column_names"], bool(one["unique"])) for one in indexes),
    }


def _given(name: str) -> str:
    return "" if name.startswith("sqlite_autoindex_") else name  # numbered in the order of the statement


def _type(reflected: sa.types.TypeEngine[Any]) -> str:
    generic = reflected.as_generic()
    return "Double()" if isinstance(generic, sa.Float) else repr(generic)  # one name of two that SQLite has for 8 bytes


def as_the_program_says(engine: sa.Engine) -> dict[str, Any]:
    """The same of tables that are made from what the program uses."""
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE slipway_schema"))
        for table in tables(engine):
            connection.execute(sa.text(f"DROP TABLE {table}"))
        schema.metadata.create_all(connection)
    return tables(engine)


def test_the_migrations_lead_to_the_tables_the_program_uses(engine: sa.Engine) -> None:
    assert migrations.migrate(engine) == len(MIGRATIONS)
    assert migrations.migrate(engine) == 0
    migrations.check(engine)
    migrated = tables(engine)
    assert set(migrated) == set(schema.metadata.tables)
    assert migrated == as_the_program_says(engine)


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_every_version_with_an_export_of_the_first_is_taken_over(engine: sa.Engine, version: int) -> None:
    migrations.migrate(engine, MIGRATIONS[:1])
    with engine.begin() as connection:
        connection.execute(sa.text(FIRST_ROW), {"name": OLD, "record": json.dumps(RECORD)})
    migrations.migrate(engine, MIGRATIONS[:version])  # a stop on the way
    migrations.migrate(engine)
    with engine.connect() as connection:
        row = connection.execute(sa.select(schema.exports)).mappings().one()
        labels = connection.execute(sa.select(schema.labels.c.name, schema.labels.c.value)).all()
    assert json.loads(row["record"]) == RECORD
    assert (row["state"], row["end_time"], row["run"], row["ended"]) == ("failed", 2.5, 3, True)
    assert (row["revision"], row["sequence_limit"], row["request_id"], row["creator"]) == (7, 10_000, None, "")
    assert row["shape"] == ""  # so that the record is checked at the next start, and read for lists
    assert {tuple(label) for label in labels} == {("team", "speech"), ("n", "1")}
    database = Database(engine.url.render_as_string(hide_password=False))
    assert database.ownership.find_owned("default", [BASE, MADE]) == {BASE, MADE}
    database.close()
    migrated = tables(engine)
    assert migrated == as_the_program_says(engine)


def test_migrations_use_nothing_that_changes_with_the_program() -> None:
    tree = ast.parse(Path(migrations.__file__).read_text())
    names = {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    names |= {alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names}
    assert {name for name in names if name.startswith("slipway")} == {"slipway.errors"}


def test_a_migration_that_fails_changes_nothing(engine: sa.Engine) -> None:
    def broken(connection: sa.Connection) -> None:
        connection.execute(sa.text("ALTER TABLE slipway_exports ADD COLUMN half INTEGER"))
        raise RuntimeError("in the middle")

    migrations.migrate(engine)
    with pytest.raises(RuntimeError, match="middle"):
        migrations.migrate(engine, [*MIGRATIONS, broken])
    migrations.check(engine)
    assert "half" not in [column["name"] for column in sa.inspect(engine).get_columns("slipway_exports")]


def test_a_program_refuses_tables_of_another_version_and_leaves_them(engine: sa.Engine) -> None:
    with pytest.raises(ModelExportError, match="migrate") as caught:
        migrations.check(engine)
    assert caught.value.reason == "STATE_SCHEMA"
    newer = [*MIGRATIONS, lambda connection: connection.execute(sa.text("CREATE TABLE slipway_new (x INTEGER)"))]
    migrations.migrate(engine, newer)
    before = tables(engine)
    assert migrations.migrate(engine) == 0
    assert tables(engine) == before
    with pytest.raises(ModelExportError, match="newer"):
        migrations.check(engine)


def test_migrating_twice_at_once_is_migrating_once(server: PostgresServer) -> None:
    state = state_at(server.create("twice"))
    applied: list[int] = []
    threads = [threading.Thread(target=lambda: applied.append(migrate(state))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(applied) == [0, 0, len(MIGRATIONS)]
