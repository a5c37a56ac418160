"""``slipway coordinator --webhooks`` as users start it, killed between a commit and what it would send, and replaced by a standby."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

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
from support.servers.postgres_server import PostgresServer, postgres_server
from support.servers.webhook_receiver import SECRET, WebhookReceiver, webhook_receiver, webhooks_file

SOURCES = {"base": DIGEST, "adapter": DIGEST}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


def command(place: str, webhooks: Path, address: str) -> list[str]:
    return [SLIPWAY, "coordinator", "--listen", address, "--state", place, "--webhooks", str(webhooks)]


def answers(client: Client) -> bool:
    try:
        list(client.list_exports())
    except ModelExportError as error:
        assert error.reason == "COORDINATOR_UNAVAILABLE", error
        return False
    return True


def create(client: Client, name: str) -> None:
    client.create_export(ExportConfiguration(), sources=SOURCES, export_id=name)


def cancel(client: Client, name: str) -> None:
    client.cancel_export(name)
    wait_for(lambda: state(client.get_export(name)) == "cancelled")


def stored(place: Path, *, attempts: int = 0) -> dict[str, str]:
    """Ids of the deliveries in a SQLite state that were tried at most so often, by type."""
    with closing(sqlite3.connect(f"file:{place}?mode=ro", uri=True)) as connection:
        query = "SELECT type, id FROM slipway_deliveries WHERE attempts <= ?"
        return dict(connection.execute(query, (attempts,)))


def kill(running: subprocess.Popen[bytes]) -> None:
    running.kill()
    assert running.wait(60) == -9


def own_artifact(place: str) -> None:
    """Let the project have the artifact that exports are of."""
    database = Database(state_at(place).url)
    database.ownership.record_artifact("default", DIGEST)
    database.close()


def test_a_killed_coordinator_loses_no_event(tmp_path: Path) -> None:
    """The receiver has not answered when the coordinator is killed: the commit is done, and the delivery is not."""
    place, address = tmp_path / "state.db", f"127.0.0.1:{free_port()}"
    held = WebhookReceiver()
    held.respond = lambda _, __: held.ended.wait(60) and None
    with webhook_receiver(held), Client(address) as client:
        start = command(str(place), webhooks_file(tmp_path, held.entry(timeout_seconds=60)), address)
        with process(start, tmp_path / "first.log") as first:
            wait_for(lambda: answers(client), seconds=300)
            own_artifact(str(place))
            create(client, "x")
            wait_for(lambda: held.requests)
            kill(first)
        waiting = stored(place)
        assert "export.created" in waiting
        held.respond = None
        with process(start, tmp_path / "second.log") as second:
            wait_for(lambda: answers(client), seconds=300)
            client.cancel_export("x")
            held.wait_for("created", "started", "cancelled")
            second.terminate()
            assert second.wait(60) == 0
        told = {f"export.{one.type}": one.id for one in held.taken}
        assert waiting.items() <= told.items()
        assert all(one.verified() for one in held.taken)
    logs = (tmp_path / "first.log").read_text() + (tmp_path / "second.log").read_text()
    assert "Traceback" not in logs
    assert SECRET not in logs
    assert SECRET.removeprefix("whsec_") not in logs
    assert stored(place) == {}


@pytest.mark.slow
def test_kills_at_any_moment_lose_no_event_and_change_no_order(tmp_path: Path) -> None:
    """While a receiver takes only some of what it is sent."""
    generator, place, address = random.Random(1), str(tmp_path / "state.db"), f"127.0.0.1:{free_port()}"
    moody = WebhookReceiver()
    moody.respond = lambda *_: generator.choice([204, 204, 500])
    created: set[str] = set()
    with webhook_receiver(moody), Client(address) as client:
        start = command(place, webhooks_file(tmp_path, moody.entry()), address)
        for number in range(5):
            with process(start, tmp_path / "log") as running:
                wait_for(lambda: answers(client), seconds=300)
                own_artifact(place)
                for export in range(generator.randint(3, 12)):
                    name = f"e{number}-{export}"
                    create(client, name)
                    created.add(name)
                    if generator.random() < 0.3:
                        client.cancel_export(name)
                time.sleep(generator.uniform(0, 1.5))
                kill(running)
        moody.respond = None
        with process(start, tmp_path / "log"):
            wait_for(lambda: answers(client), seconds=300)
            for name in sorted(created):
                cancel(client, name)
            wait_for(lambda: stored(Path(place), attempts=100) == {}, seconds=120)
    log = (tmp_path / "log").read_text()
    arrived = {one.id: one for one in reversed(moody.taken)}  # each as it came first
    for name in created:
        told = [one.type for one in moody.taken if one is arrived[one.id] and one.event["subject"].endswith(f"/{name}")]
        assert told == ["created", "started", "cancelled"], f"{name}: {told} {log}"
    assert len(arrived) == 3 * len(created)
    assert all(one.verified() for one in moody.taken[-10:])
    assert "Traceback" not in log
    print(f"{len(created)} exports, {len(moody.taken) - len(arrived)} events arrived twice")


def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    webhooks = webhooks_file(tmp_path, {"name": "a", "url": "http://a.example", "secret_file": "secret"})
    start = command(str(tmp_path / "state.db"), webhooks, f"127.0.0.1:{free_port()}")
    done = subprocess.run(start, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
    assert "WEBHOOKS_INVALID" in done.stderr
    assert "a: url begins with https://" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "state.db").exists()


@pytest.mark.slow
def test_a_standby_sends_what_the_killed_one_did_not(tmp_path: Path, server: PostgresServer) -> None:
    place = server.create("webhooks")
    migrate(state_at(place))
    own_artifact(place)
    down = WebhookReceiver(port=free_port())
    webhooks = webhooks_file(tmp_path, down.entry())
    ports = free_port(), free_port()
    starts = [command(place, webhooks, f"127.0.0.1:{port}") for port in ports]
    with (
        Client(f"127.0.0.1:{ports[0]}") as client,
        Client(f"127.0.0.1:{ports[1]}") as other,
        process(starts[0], tmp_path / "first.log") as first,
    ):
        wait_for(lambda: answers(client), seconds=300)
        with process(starts[1], tmp_path / "second.log"):
            wait_for(lambda: "standing by" in (tmp_path / "second.log").read_text(), seconds=300)
            for number in range(5):
                create(client, f"e{number}")
            wait_for(lambda: "does not take events" in (tmp_path / "first.log").read_text())
            kill(first)
            wait_for(lambda: "active" in (tmp_path / "second.log").read_text())
            wait_for(lambda: answers(other))
            with webhook_receiver(down):
                for number in range(5):
                    cancel(other, f"e{number}")
                for number in range(5):
                    down.wait_for("created", "started", "cancelled", export=f"/e{number}")
        assert all(one.verified() for one in down.taken)
    assert "Traceback" not in (tmp_path / "second.log").read_text()
