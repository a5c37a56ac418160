"""States of both kinds: in a file, and in a database of a real PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import state_at
from support.commands.child_processes import owned
from support.servers.postgres_server import PostgresServer, postgres_server


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """One PostgreSQL, in which each test makes databases of its own."""
    with postgres_server() as running:
        owned.add(running.pid)  # of the session, although a test asks for it
        yield running


@pytest.fixture(params=["sqlite", "postgres"])
def state_kind(request: pytest.FixtureRequest) -> str:
    """The kind of state; a file whose tests repeat themselves with the second one overrides this."""
    return str(request.param)


@pytest.fixture
def place(state_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty state of the kind is: a file, or the address of a database."""
    if state_kind == "sqlite":
        return str(tmp_path / "state.db")
    server: PostgresServer = request.getfixturevalue("server")
    return server.create(f"d{time.monotonic_ns()}")


@pytest.fixture
def database(place: str) -> Iterator[Database]:
    database = Database(state_at(place).url)
    database.migrate()
    database.prepare()
    yield database
    database.close()
