"""``slipway export --each`` and lists of runs: real processes, with stages that do almost nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.exporting.batches.result import TABLE
from support import TINY_STAGES
from support.commands.cli import SLIPWAY, Done, slipway, start
from support.coordinators.harness import process, state, wait_for
from support.models.sweeps import make_sweep
from support.servers.free_ports import free_port

pytestmark = pytest.mark.timeout(900)


class Sweep:
    """A folder with three runs and a model on one base, and stages that can be held."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.stages = root, make_sweep(root, "a", "b", "c"), root / "stages"
        self.stages.mkdir()
        (self.folder / "notes.txt").touch()
        path = os.pathsep.join([str(TINY_STAGES), os.environ.get("PYTHONPATH", "")])
        self.variables = {"PYTHONPATH": path, "SLIPWAY_TEST_STAGES": str(self.stages)}

    @property
    def words(self) -> list[str]:
        where = ["--base-model", self.root / "base", "--out", self.root / "out", "-f", "pytorch:none+int8"]
        settings = ["--set", "validation.enabled=false", "--set", "output.naming_pattern={model_name}"]
        return [str(word) for word in ("export", "--each", self.folder, *where, *settings)]

    def run(self, *more: str) -> Done:
        return slipway(*self.words, "--json", *more, home=self.root / "home", **self.variables)

    def runs(self) -> list[str]:
        path = self.stages / "runs"
        return path.read_text().split() if path.exists() else []

    def outputs(self) -> list[str]:
        return sorted(path.name for path in (self.root / "out").iterdir())


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def states(document: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {each["name"]: (each["state"], each["exit_code"]) for each in document["exports"]}


def test_a_failure_in_the_middle_does_not_end_the_others_and_the_table_is_the_answer(sweep: Sweep) -> None:
    (sweep.folder / "b" / "checkpoint-10" / "adapter_model.safetensors").write_bytes(b"")
    done = sweep.run()
    assert done.code == 3, done.err
    document = done.json
    good = ("succeeded", 0)
    assert states(document) == {"a": good, "b": ("impossible", 3), "c": good}
    assert [each["name"] for each in document["left_out"]] == ["notes.txt"]
    assert sweep.outputs() == ["a", TABLE, "c"]
    assert json.loads((sweep.root / "out" / TABLE).read_text()) == document
    assert "b: [CHECKPOINT_INCOMPLETE]" in done.err
    assert len({each["result"]["export_id"] for each in document["exports"] if each["result"]}) == 2
    before = sweep.runs()

    again = sweep.run()
    assert states(again.json) == states(document)
    assert sweep.runs() == before, "what was done is not done again"

    (sweep.stages / "fail-quantize").touch()
    taken = sweep.run("--set", "optimization.group_size=64")
    assert taken.code == 3
    assert [each["reason"] for each in taken.json["exports"]] == [
        "OUTPUT_EXISTS",
        "CHECKPOINT_INCOMPLETE",
        "OUTPUT_EXISTS",
    ]
    failing = sweep.run("--set", "optimization.group_size=64", "--out", str(sweep.root / "other"))
    assert failing.code == 3  # an impossible one decides before what a machine cannot make
    assert states(failing.json) == {"a": ("failed", 6), "b": ("impossible", 3), "c": ("failed", 6)}
    assert set(failing.json["exports"][0]["result"]["paths"]) == {"pytorch"}
    shown = slipway(*sweep.words, home=sweep.root / "home", **sweep.variables)
    assert shown.code == 3
    assert "2 of 3 exports succeeded" in shown.out
    assert "left out notes.txt: it is a file" in shown.out
    assert str(sweep.root / "out" / TABLE) in shown.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_interrupt_ends_the_running_one_and_the_same_command_continues(sweep: Sweep, number: signal.Signals) -> None:
    hold = sweep.stages / "hold-quantize"
    first = start([*sweep.words, "--progress", "none"], sweep.root / "home", **sweep.variables)
    wait_for((sweep.root / "out" / "a").exists, seconds=300)
    hold.touch()
    wait_for(lambda: sweep.runs().count("quantize") == 2, seconds=300)
    children = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, number)
    _, errors = first.communicate(timeout=300)
    assert first.returncode == 130, errors
    assert "run the same command again to continue" in errors
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert not (sweep.root / "out" / TABLE).exists()
    assert "c" not in sweep.outputs()
    hold.unlink()
    before = sweep.runs()
    assert before.count("merge") == 2
    done = sweep.run()
    assert done.code == 0, done.err
    assert [state for state, _ in states(done.json).values()] == ["succeeded"] * 3
    new = sweep.runs()[len(before) :]
    assert new.count("merge") == 1, "of the third alone"


@pytest.fixture
def coordinator(sweep: Sweep) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    variables = {**sweep.variables, "SLIPWAY_HOME": str(sweep.root / "server")}

    def answers() -> bool:
        with Client(address) as client:
            try:
                return list(client.list_exports()) == []
            except ModelExportError:
                return False

    with ExitStack() as stack:
        coordinating = [SLIPWAY, "coordinator", "--listen", address, "--state", str(sweep.root / "state.db")]
        working = [SLIPWAY, "worker", "--coordinator", address, "--drain-seconds", "0"]
        stack.enter_context(process(coordinating, sweep.root / "coordinator.log", **variables))
        stack.enter_context(process(working, sweep.root / "worker.log", **variables))
        wait_for(answers, seconds=300)
        yield address


@pytest.mark.slow
def test_at_a_coordinator_all_are_submitted_and_then_watched(sweep: Sweep, coordinator: str) -> None:
    hold = sweep.stages / "hold-merge"
    hold.touch()
    running = start([*sweep.words, "--json", "--coordinator", coordinator], sweep.root / "home", **sweep.variables)
    with Client(coordinator) as client:
        wait_for(lambda: len(list(client.list_exports())) == 3, seconds=300)
        hold.unlink()
        out, errors = running.communicate(timeout=500)
        assert running.returncode == 0, errors
        document = json.loads(out)
        assert states(document) == dict.fromkeys("abc", ("succeeded", 0))
        assert sweep.outputs() == ["a", "b", TABLE, "c"]
        ids = {each["result"]["export_id"] for each in document["exports"]}
        assert ids == {export.name.rpartition("/")[2] for export in client.list_exports()}


@pytest.mark.slow
def test_an_interrupt_cancels_all_at_the_coordinator(sweep: Sweep, coordinator: str) -> None:
    (sweep.stages / "hold-merge").touch()
    running = start([*sweep.words, "--coordinator", coordinator], sweep.root / "home", **sweep.variables)
    with Client(coordinator) as client:
        wait_for(lambda: len(list(client.list_exports())) == 3, seconds=300)
        wait_for(sweep.runs, seconds=300)
        os.kill(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=300)
        assert running.returncode == 130, errors
        wait_for(lambda: {state(export) for export in client.list_exports()} == {"cancelled"}, seconds=120)


SCRIPT = """
import asyncio, sys
import slipway

root, mode = sys.argv[1:]
seen = []
options = {
    "base": f"{root}/base", "out": f"{root}/out", "formats": "pytorch", "settings": {"validation.enabled": False},
    "progress": lambda told: seen.append((told.run, told.number, told.of, told.state)),
}
runs = [f"{root}/sweep/b", f"{root}/sweep/missing", f"{root}/sweep/a"]
batch = asyncio.run(slipway.export_async(runs, **options)) if mode == "async" else slipway.export(runs, **options)
print(repr(batch))
print([(entry.name, entry.state) for entry in batch])
print(sorted({(run, number, of) for run, number, of, _ in seen}))
print([run for run, *_, state in dict.fromkeys(seen) if state == "succeeded"])
one = slipway.export([runs[0]], **options)
print(len(one), type(one).__name__, one.success)
"""


@pytest.mark.parametrize("mode", ["blocking", pytest.param("async", marks=pytest.mark.slow)])
def test_a_program_exports_a_list(sweep: Sweep, mode: str) -> None:
    script = sweep.root / "script.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, **sweep.variables, "SLIPWAY_HOME": str(sweep.root / "home")}
    done = subprocess.run(
        [sys.executable, script, sweep.root, mode], env=variables, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    first, second, third, entries, positions, succeeded, one = done.stdout.splitlines()
    assert first == "BatchResult: 2 of 3 exports succeeded"
    assert second == "failed: missing CHECKPOINT_NOT_FOUND"
    assert third == str(sweep.root / "out" / TABLE)
    assert entries == "[('b', 'succeeded'), ('missing', 'impossible'), ('a', 'succeeded')]"
    assert positions == "[('a', 3, 3), ('b', 1, 3)]"
    assert succeeded == "['b', 'a']"
    assert one == "1 BatchResult True"
