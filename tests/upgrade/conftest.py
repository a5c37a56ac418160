"""The earlier version, and states of either kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.postgres_server import PostgresServer, postgres_server
from support.upgrades.versions import Version, previous_version


@pytest.fixture(scope="session")
def previous() -> Version:
    """The earlier version; tests that need it are skipped where none is given."""
    version = previous_version()
    if version is None:
        pytest.skip("no earlier version is given: make test-upgrade PREVIOUS=<git ref>")
    return version


@pytest.fixture(scope="session")
def postgres(previous: Version) -> Iterator[PostgresServer]:
    """A running server; every test takes a database of its own."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, postgres: PostgresServer, tmp_path: Path) -> str:
    """An empty state of either kind, without tables."""
    if request.param == "sqlite":
        return str(tmp_path / "state.db")
    return postgres.create(f"d{tmp_path.name}".lower())
