"""What operators do to a PostgreSQL state, as the documents say: exchange its password, and restore a backup."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from slipway.client import Client
from slipway.configuration import ExportConfiguration
from slipway.errors import ModelExportError
from slipway_coordinator.server import migrate
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import state_at
from support.commands.cli import SLIPWAY
from support.coordinators.harness import DIGEST, process, state, wait_for
from support.servers.free_ports import free_port
from support.servers.postgres_server import PostgresServer

DOCS = Path(__file__).parents[4] / "docs"
PLACE = "postgresql:///passwords?service=slipway"
SOURCES = {"base": DIGEST, "adapter": DIGEST}


def own_artifact(place: str) -> None:
    """Let the project have the artifact that exports are of."""
    database = Database(state_at(place).url)
    database.ownership.record_artifact("default", DIGEST)
    database.close()


def answers(client: Client) -> bool:
    try:
        list(client.list_exports())
    except ModelExportError as error:
        assert error.reason == "COORDINATOR_UNAVAILABLE", error
        return False
    return True


def create(client: Client, name: str) -> None:
    """Create an export, and wait until its first task waits for a worker."""
    client.create_export(ExportConfiguration(), sources=SOURCES, export_id=name)
    wait_for(lambda: state(client.get_export(name)) == "running")


@pytest.mark.slow
def test_a_new_password_needs_no_restart(
    tmp_path: Path, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq reads the service file for every connection; the coordinator goes on with the one it has, and makes new ones."""
    server.create("passwords")
    service = tmp_path / "pg_service.conf"

    def write(password: str) -> None:
        new = service.with_suffix(".new")
        lines = ["[slipway]", "host=127.0.0.1", f"port={server.port}", "dbname=passwords", "user=app"]
        new.write_text("\n".join([*lines, f"password={password}", ""]))
        new.replace(service)

    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE app LOGIN PASSWORD 'one'")
        admin.execute("ALTER DATABASE passwords OWNER TO app")
    server.ask_for_password("app")
    write("one")
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    migrate(state_at(PLACE))
    own_artifact(PLACE)
    address = f"127.0.0.1:{free_port()}"
    command = [SLIPWAY, "coordinator", "--listen", address, "--state", PLACE]
    with process(command, tmp_path / "log") as running, Client(address) as client:
        wait_for(lambda: answers(client))
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("ALTER ROLE app PASSWORD 'two'")
            write("two")
            # All but the connection that holds the lock, which nobody has to make anew.
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app' AND pid NOT IN "
                "(SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
            )
        wait_for(lambda: answers(client))
        create(client, "x")
        assert running.poll() is None, "it is still the process of before"


@pytest.mark.slow
def test_what_a_backup_has_goes_on_and_what_it_has_not_is_unknown(tmp_path: Path, server: PostgresServer) -> None:
    place = server.create("exports")
    migrate(state_at(place))
    own_artifact(place)
    address = f"127.0.0.1:{free_port()}"
    command = [SLIPWAY, "coordinator", "--listen", address, "--state", place]
    with Client(address) as client:
        with process(command, tmp_path / "first.log") as first:
            wait_for(lambda: answers(client))
            create(client, "before")
            backup = server.dump("exports")
            create(client, "after")
            client.cancel_export("before")
            wait_for(lambda: state(client.get_export("before")) == "cancelled")
            first.kill()
            first.wait()
        server.restore("exports", backup)
        migrate(state_at(place))  # nothing to do
        with process(command, tmp_path / "second.log"):
            wait_for(lambda: answers(client))
            assert [export.name.rpartition("/")[2] for export in client.list_exports()] == ["before"]
            assert state(client.get_export("before")) == "running", "as it was"
            client.cancel_export("before")
            wait_for(lambda: state(client.get_export("before")) == "cancelled")
            create(client, "after")


def test_the_documents_name_these_commands() -> None:
    page = (DOCS / "operations.md").read_text() + (DOCS / "kubernetes.md").read_text()
    assert "pg_dump --format=custom" in page
    assert re.search(r"pg_restore --clean --if-exists --no-owner --dbname=service=slipway", page)
    assert "[slipway]\nhost=" in page
