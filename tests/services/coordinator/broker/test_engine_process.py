"""``slipway coordinator --engine``: a coordinator of its own process whose tasks run on an engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway.settings import Settings
from slipway.settings.security import Security
from slipway_coordinator.engines import engine_setup
from slipway_coordinator.storage.database_access import SqliteState
from support import TINY_ENGINE, TINY_STAGES
from support.commands.cli import SLIPWAY
from support.coordinators.harness import TinyStages, process, state, wait_for
from support.servers.free_ports import free_port

SETTINGS = parse({"formats": {"onnx": {"enabled": False}}, "validation": {"compare_outputs": False}})
COMMAND = [SLIPWAY, "coordinator", "--engine", "processes"]


def variables(home: Path) -> dict[str, str]:
    path = os.pathsep.join([str(TINY_STAGES), str(TINY_ENGINE), os.environ["PYTHONPATH"]])
    return {"SLIPWAY_TEST_STAGES": str(home), "PYTHONPATH": path, "SLIPWAY_HOME": str(home)}


@contextmanager
def coordinator(home: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, "--listen", address, "--state", str(home / "state.db")]
    with process(command, home / "coordinator.log", **variables(home)) as started:
        yield started


@pytest.mark.slow
def test_workers_go_on_while_their_coordinator_is_restarted(tmp_path: Path) -> None:
    stages, address = TinyStages(tmp_path), f"127.0.0.1:{free_port()}"
    held = stages.hold("merge")
    with ExitStack() as stack, Client(address) as client:
        first = stack.enter_context(coordinator(tmp_path, address))
        wait_for(lambda: _serves(client))
        name = client.create_export(SETTINGS, sources=stages.sources(), export_id="x").name
        wait_for(lambda: "merge" in stages.runs())
        first.terminate()
        first.wait(60)
        stack.enter_context(coordinator(tmp_path, address))
        wait_for(lambda: _serves(client))
        held.unlink()
        export = list(client.watch_export(name))[-1].export
        assert state(export) == "succeeded"
    assert stages.runs().count("merge") == 1


def _serves(client: Client) -> bool:
    try:
        return list(client.list_exports()) is not None
    except ModelExportError:
        return False


@pytest.mark.parametrize(
    ("engine", "listen", "access", "reason", "remedy"),
    [
        ("processes", "0.0.0.0:7070", False, "CONFIGURATION_INVALID", "--advertise"),
        ("processes", "unix:/tmp/s", False, "CONFIGURATION_INVALID", "--advertise"),
        ("mesos", "127.0.0.1:7070", False, "ENGINE_UNKNOWN", "processes"),
        ("processes:away", "127.0.0.1:7070", False, "ENGINE_UNAVAILABLE", ""),
        ("processes", "127.0.0.1:7070", True, "ACCESS_INVALID", "SLIPWAY_TOKEN_FILE"),
    ],
)
def test_an_engine_whose_nodes_could_not_call_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    listen: str,
    access: bool,
    reason: str,
    remedy: str,
) -> None:
    monkeypatch.syspath_prepend(str(TINY_ENGINE))
    settings, state_ = Settings(home=tmp_path, scratch=tmp_path), SqliteState(tmp_path / "state.db")
    security = Security(access_file=tmp_path / "access.yaml" if access else None)
    chosen = engine_setup(engine, settings, security, state_, listen=listen, advertise="")
    with pytest.raises(ModelExportError) as caught, chosen:
        pass
    assert (caught.value.reason, remedy in caught.value.remedy) == (reason, True)


def test_nodes_call_the_advertised_address_and_a_restarted_coordinator_has_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TINY_ENGINE))
    monkeypatch.setenv("SLIPWAY_TEST_STAGES", str(tmp_path))
    settings, state_ = Settings(home=tmp_path, scratch=tmp_path), SqliteState(tmp_path / "state.db")
    owners = set()
    for advertise, address in (("", "127.0.0.1:7071"), ("here:7070", "here:7070")):
        security = Security(token="t" * 16)  # type: ignore[arg-type]
        with engine_setup(
            "processes", settings, security, state_, listen="127.0.0.1:7070", advertise=advertise
        ) as setup:
            assert setup is not None
            made = setup(7071)
        worker = made.engine.worker  # type: ignore[attr-defined]
        assert worker.coordinator == address
        assert worker.environment["SLIPWAY_TOKEN"].get_secret_value() == "t" * 16
        owners.add(made.owner)
    assert len(owners) == 1
    with engine_setup("", settings, Security(), state_, listen="0.0.0.0:1", advertise="") as setup:
        assert setup is None
