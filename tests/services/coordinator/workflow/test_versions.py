"""Coordinators of several versions, one after another, on the state of an export that is under way; each a process."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway_coordinator.server import migrate
from slipway_coordinator.storage import schema
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import state_at
from slipway_coordinator.workflow import engine
from slipway_protos.v1 import export_pb2
from support import SUPPORT, TINY_STAGES
from support.commands.cli import SLIPWAY
from support.coordinators.harness import TinyStages, process, state, states, wait_for, worker_process
from support.servers.free_ports import free_port
from support.servers.postgres_server import postgres_server

pytestmark = pytest.mark.slow

SETTINGS = parse(
    {
        "formats": {"onnx": {"enabled": False}},
        "optimization": {"quantization": "int8"},
        "validation": {"compare_outputs": False},
    }
)
RULES = (
    "rules: [{name: again, reasons: [UNSUPPORTED], repeat: true, limit: 99, say: again}]\nguidance: {default: [call]}\n"
)
THIS, OTHER = engine.WORKFLOW_VERSION, "slipway-of-another-day"


@dataclass
class Installation(TinyStages):
    """A state, a worker of tiny stages, and coordinators that come and go."""

    place: str
    address: str
    client: Client

    def coordinator(self, version: str) -> ExitStack:
        """Start a coordinator of a version; leaving the context kills it."""
        arguments = ["--listen", self.address, "--state", self.place, "--lease-seconds", "10"]
        arguments += ["--recovery-rules", str(self.home / "rules.yaml")]
        command = [sys.executable, str(SUPPORT / "coordinators" / "another_version.py"), version, *arguments]
        if version == THIS:
            command = [SLIPWAY, "coordinator", *arguments]
        with ExitStack() as stack:
            started: subprocess.Popen[bytes] = stack.enter_context(process(command, self.home / "coordinator.log"))
            stack.callback(started.kill)
            wait_for(lambda: self.look() is not None or started.poll() is not None)
            assert started.poll() is None, self.log()
            return stack.pop_all()
        raise AssertionError

    def look(self) -> list[export_pb2.Export] | None:
        try:
            return list(self.client.list_exports())
        except ModelExportError as error:
            assert error.reason == "COORDINATOR_UNAVAILABLE"
            return None

    def export(self) -> export_pb2.Export:
        found = self.look()
        assert found is not None
        return found[0]

    def create(self) -> None:
        self.client.create_export(SETTINGS, sources=self.sources(), export_id="x")

    def log(self) -> str:
        return (self.home / "coordinator.log").read_text()


def attempts(task: export_pb2.Task) -> list[tuple[object, ...]]:
    """What is told of a task's attempts, and what they made."""
    told = [(a.number, a.state, a.worker, a.rule, a.error.message) for a in task.attempts]
    when = [(a.start_time.ToNanoseconds(), a.end_time.ToNanoseconds()) for a in task.attempts]
    return [*told, *when, tuple(sorted(task.outputs.items()))]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A file of SQLite, or where a test asks for it a database of PostgreSQL."""
    if getattr(request, "param", "sqlite") == "sqlite":
        yield str(tmp_path / "state.db")
        return
    with postgres_server() as running:
        place = running.create("versions")
        migrate(state_at(place))
        yield place


@pytest.fixture
def installation(tmp_path: Path, place: str) -> Iterator[Installation]:
    (tmp_path / "rules.yaml").write_text(RULES)
    address = f"127.0.0.1:{free_port()}"
    path = os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]])
    more = {"SLIPWAY_TEST_STAGES": str(tmp_path), "PYTHONPATH": path}
    with Client(address) as client, worker_process(tmp_path, address, "merge,quantize,validate", **more):
        yield Installation(tmp_path, place, address, client)


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_an_export_under_way_goes_on_under_another_version_and_back(installation: Installation) -> None:
    """With a decision behind it, a stage that is done and one that runs: nothing of it is repeated."""
    quantize, validate = installation.hold("quantize"), installation.hold("validate")
    failing = installation.home / "fail-merge"
    failing.touch()
    with installation.coordinator(THIS):
        installation.create()
        wait_for(lambda: len(installation.export().tasks[0].attempts) > 1)
        failing.unlink()
        wait_for(lambda: installation.runs()[-1:] == ["quantize"])
        wait_for(lambda: states(installation.export())["quantize-pytorch-int8"] == "running")
        before = installation.export()
        runs = installation.runs()
    with installation.coordinator(OTHER):
        now = installation.export()
        assert state(now) == "running", now.error
        assert attempts(now.tasks[0]) == attempts(before.tasks[0])
        assert states(now) == states(before)
        quantize.unlink()
        wait_for(lambda: installation.runs() == [*runs, "validate"])
        wait_for(lambda: states(installation.export())["validate"] == "running")
    with installation.coordinator(THIS):
        assert states(installation.export())["validate"] == "running"
        validate.unlink()
        ended = wait_for(lambda: state(installation.export()) != "running" and installation.export(), seconds=120)
    assert state(ended) == "succeeded", ended.error
    assert installation.runs() == [*runs, "validate"]
    assert attempts(ended.tasks[0]) == attempts(before.tasks[0])
    assert [len(task.attempts) for task in ended.tasks[1:]] == [1, 1]
    for version, other in ((THIS, OTHER), (OTHER, THIS)):
        assert f"was begun by {version} and goes on as {other}" in installation.log()


def test_an_export_of_a_version_that_noted_no_position_goes_on(installation: Installation) -> None:
    quantize = installation.hold("quantize")
    with installation.coordinator("slipway-2"):
        installation.create()
        wait_for(lambda: installation.runs() == ["merge", "quantize"])
        wait_for(lambda: states(installation.export())["quantize-pytorch-int8"] == "running")
        before = installation.export()
    with sqlite3.connect(installation.place) as connection:  # as that version wrote it
        (text,) = connection.execute("SELECT record FROM slipway_exports").fetchone()
        record = json.loads(text)
        assert record.pop("events_read") == 3  # leased, succeeded, leased
        connection.execute("UPDATE slipway_exports SET record = ?", (json.dumps(record),))
        (inputs,) = connection.execute("SELECT inputs FROM workflow_input").fetchone()
        given = json.loads(inputs)
        first = json.loads(given["positionalArgs"][0])
        given["positionalArgs"] = [first | {"revision": first["revision"] - 1}, 0.0]  # it began its run itself
        connection.execute("UPDATE workflow_input SET inputs = ?", (json.dumps(given),))
    connection.close()
    with installation.coordinator(THIS):
        quantize.unlink()
        ended = wait_for(lambda: state(installation.export()) != "running" and installation.export(), seconds=120)
    assert state(ended) == "succeeded", ended.error
    assert installation.runs() == ["merge", "quantize", "validate"]
    assert attempts(ended.tasks[0]) == attempts(before.tasks[0])


def test_a_program_before_the_one_that_wrote_an_export_refuses_to_start(installation: Installation) -> None:
    """What an older version does not understand it leaves alone, and says so."""
    hold = installation.hold("merge")
    with installation.coordinator(THIS):
        installation.create()
        wait_for(lambda: installation.runs() == ["merge"])
    url = state_at(installation.place).url
    database = sa.create_engine(url)
    with database.begin() as connection:
        record = json.loads(connection.execute(sa.select(schema.exports.c.record)).scalar_one())
        stored = json.dumps(record | {"state": "suspended"})
        connection.execute(sa.update(schema.exports).values(record=stored, shape="another"))
    arguments = ["--listen", installation.address, "--state", installation.place]
    command = [SLIPWAY, "coordinator", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=installation.home, timeout=240)
    assert done.returncode == 3, done.stderr
    assert "STATE_SCHEMA" in done.stderr
    assert "projects/default/exports/x" in done.stderr
    assert "newer" in done.stderr
    assert "Traceback" not in done.stderr
    with database.connect() as connection:
        assert connection.execute(sa.select(schema.exports.c.record)).scalar_one() == stored
    database.dispose()
    hold.unlink()


def test_reading_what_another_version_wrote_is_refused_by_name(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    database.prepare()
    with database.transactions.begin() as connection:
        row = {"name": "projects/p/exports/e", "project": "p", "create_time": 1.0, "ended": False, "revision": 1}
        row |= {"sequence_limit": 0, "record": '{"name": "projects/p/exports/e", "state": "new"}'}
        connection.execute(sa.insert(schema.exports).values(row))
    with pytest.raises(ModelExportError, match="projects/p/exports/e") as caught:
        database.get("projects/p/exports/e")
    assert caught.value.reason == "STATE_SCHEMA"
    with pytest.raises(ModelExportError, match="projects/p/exports/e"):  # which a coordinator asks first of all
        database.unended_runs()
    database.close()
