"""A database that refuses, or holds something else, is said to do so where a coordinator starts; and the log says why one is silent."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from slipway.errors import ModelExportError
from slipway_coordinator.leadership.locks import lock_of
from slipway_coordinator.server import migrate
from slipway_coordinator.storage.database_access import check_access, driver_message, state_at
from slipway_coordinator.storage.journal import translate_database_errors
from support.commands.cli import SLIPWAY
from support.servers.free_ports import free_port
from support.servers.postgres_server import PostgresServer, postgres_server

PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that asks the role ``asked`` for a password, with a migrated database ``good`` and roles that may not change it."""
    with postgres_server() as running:
        with psycopg.connect(running.url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE asked LOGIN PASSWORD '{PASSWORD}'")  # type: ignore[call-overload]
            for role in ("reader", "half", "writer"):
                connection.execute(f"CREATE ROLE {role} LOGIN")  # type: ignore[call-overload]
        running.ask_for_password("asked")
        migrate(state_at(running.create("good")))
        with psycopg.connect(running.database("good"), autocommit=True) as connection:
            for grant in (
                "USAGE ON SCHEMA dbos TO reader, writer",
                "SELECT ON ALL TABLES IN SCHEMA public, dbos TO reader",
                "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO half, writer",
                "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dbos TO writer",
            ):
                connection.execute(f"GRANT {grant}")  # type: ignore[call-overload]
        yield running


def place(server: PostgresServer, user: str, database: str) -> str:
    return f"postgresql://{user}@127.0.0.1:{server.port}/{database}"


def started(where: str) -> tuple[int, str]:
    """How a coordinator ends that cannot start there, and the last thing it says."""
    command = [SLIPWAY, "coordinator", "--listen", "127.0.0.1:0", "--state", where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "Traceback" not in done.stderr, done.stderr
    assert PASSWORD[1:] not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("user", "database", "said"),
    [
        (f"asked:not{PASSWORD[1:]}", "good", "password"),
        ("asked", "good", "password"),
        ("nobody", "good", "nobody"),
        ("slipway", "missing", "missing"),
    ],
    ids=["wrong-password", "no-password", "no-role", "no-database"],
)
def test_a_server_that_does_not_let_it_in(server: PostgresServer, user: str, database: str, said: str) -> None:
    state = state_at(place(server, user, database))
    for begin in (check_access, migrate):
        with pytest.raises(ModelExportError) as caught:
            begin(state)
        assert caught.value.reason == "STATE_DENIED"
        assert caught.value.about == {"user": user.partition(":")[0], "host": "127.0.0.1", "database": database}
        assert said in caught.value.message
        assert PASSWORD[1:] not in str(caught.value)
        assert "check user" in caught.value.remedy


def test_a_coordinator_with_a_wrong_password_ends_and_says_so(server: PostgresServer) -> None:
    code, said = started(place(server, f"asked:x{PASSWORD[1:]}", "good"))
    assert (code, said.partition(":")[0]) == (3, "STATE_DENIED")
    assert "asked" in said


def test_the_right_password_is_let_in(server: PostgresServer) -> None:
    with psycopg.connect(server.database("good")) as connection:
        connection.execute("GRANT SELECT ON slipway_schema TO asked")
    check_access(state_at(place(server, f"asked:{PASSWORD}", "good")))


def test_a_role_that_may_only_read(server: PostgresServer) -> None:
    code, said = started(place(server, "reader", "good"))
    assert (code, said.partition(":")[0]) == (3, "STATE_DENIED")
    assert "slipway_" in said
    with pytest.raises(ModelExportError, match="owns the database") as caught:
        migrate(state_at(place(server, "reader", "postgres")))
    assert caught.value.reason == "STATE_DENIED"


def test_a_role_that_may_not_see_the_tables_of_the_workflows(server: PostgresServer) -> None:
    code, said = started(place(server, "half", "good"))
    assert (code, said.partition(":")[0]) == (3, "STATE_SCHEMA")
    assert "dbos" in said


def test_a_server_without_a_connection_left_is_no_refusal(server: PostgresServer) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
    state = state_at(place(server, "crowded", "good"))
    check_access(state)  # a coordinator waits for it
    with pytest.raises(ModelExportError, match="too many connections") as caught:
        migrate(state)
    assert caught.value.reason == "COORDINATOR_UNAVAILABLE"


def test_a_port_where_nobody_listens_is_no_refusal() -> None:
    state = state_at(f"postgresql://slipway@127.0.0.1:{free_port()}/good")
    check_access(state)  # a coordinator waits for it
    with pytest.raises(ModelExportError, match="refused") as caught:
        migrate(state)
    assert caught.value.failure().exit_code == 7


def test_a_file_that_only_begins_like_a_database(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    file.write_bytes(b"SQLite format 3\0" + b"garbage" * 999)
    code, said = started(str(file))
    assert (code, said.partition(":")[0]) == (3, "STATE_SCHEMA")
    assert str(file) in said
    with pytest.raises(ModelExportError, match="not a database"):
        migrate(state_at(str(file)))


@pytest.mark.slow
def test_a_file_that_another_program_holds(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    with sqlite3.connect(file) as holder:
        holder.execute("CREATE TABLE t (a)")
        holder.commit()
        holder.execute("BEGIN EXCLUSIVE")
        code, said = started(str(file))
    holder.close()
    assert (code, said.partition(":")[0]) == (7, "COORDINATOR_UNAVAILABLE")
    assert "another program" in said


def test_the_log_says_why_a_database_is_silent_and_clients_hear_that_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Once, however many ask; not what they asked for, which may be anybody's."""
    engine = sa.create_engine(state_at(f"postgresql://slipway:{PASSWORD}@127.0.0.1:{free_port()}/good").url)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(ModelExportError) as caught:
                translate_database_errors(
                    lambda: engine.connect().execute(sa.text("SELECT :value"), {"value": "confidential"})
                )
    assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
    assert "refused" not in str(caught.value)
    assert len(caplog.messages) == 1
    assert "refused" in caplog.text
    for secret in (PASSWORD, "confidential"):
        assert secret not in caplog.text
    engine.dispose()


def test_words_are_one_line_without_secrets() -> None:
    said = f"bad \"host=h password='{PASSWORD}'\" in postgresql://me:{PASSWORD}@h/d\nSELECT 1"
    assert driver_message(Exception(said)) == 'bad "host=h password=***" in postgresql://me:***@h/d'


def test_a_password_is_not_shown_wherever_it_stands_in_the_url() -> None:
    state = state_at(f"postgresql://me@h/d?sslmode=require&password={PASSWORD}&sslpassword={PASSWORD}")
    assert str(state) == str(lock_of(state)) == "postgresql://me@h/d?sslmode=require"
    with pytest.raises(ModelExportError, match="%40") as caught:
        state_at(f"postgresql://me:half@{PASSWORD}@h/d")
    assert PASSWORD not in str(caught.value)


def test_a_parameter_that_is_none_is_named() -> None:
    with pytest.raises(ModelExportError, match='"sslmod"') as caught:
        state_at(f"postgresql://me:{PASSWORD}@h/d?sslmod=require")
    assert caught.value.reason == "REQUEST_INVALID"
    assert PASSWORD not in str(caught.value)
