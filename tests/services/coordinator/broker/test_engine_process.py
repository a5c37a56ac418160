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
    ("more", "code", "text"),
    [
        (["--listen", "0.0.0.0:0", "--allow-anonymous"], 3, "give --advertise"),
        pytest.param(["--engine", "mesos"], 3, "ENGINE_UNKNOWN", marks=pytest.mark.slow),
        (["--access-file", "access.yaml"], 3, "SLIPWAY_TOKEN_FILE"),
    ],
)
def test_an_engine_whose_nodes_could_not_call_is_refused(tmp_path: Path, more: list[str], code: int, text: str) -> None:
    entry = f"principals:\n  - {{name: me, role: operator, projects: ['*'], token_sha256: {'a' * 64}}}\n"
    (tmp_path / "access.yaml").write_text(entry)
    command = [*COMMAND, "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state.db"), *more]
    done = subprocess.run(
        command, env={**os.environ, **variables(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, text in done.stderr) == (code, True), done.stderr
