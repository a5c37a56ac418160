"""Exports on real Ray clusters of several raylets: nodes die, heads die, and the artifacts are those of one process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import TINY_STAGES
from support.cluster import on_engine
from support.cluster.reference import Undisturbed, reference
from support.coordinators.harness import TinyStages, wait_for
from support.servers.free_ports import free_port
from support.servers.ray_cluster import RayCluster, ray_cluster

pytest.importorskip("ray", reason="ray is not installed: pip install 'slipway-ml[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SECONDS = 600.0
"""Starting a node takes seconds on an idle machine, and minutes on a busy one."""


@dataclass
class Command(TinyStages):
    """An export that a process runs on a cluster.

    Attributes:
        process: The process.
        lines: What it printed, as :mod:`support.cluster.on_engine`.
    """

    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += (json.loads(line) for line in self.process.stdout)

    def last(self) -> dict[str, Any]:
        """Wait for its end and return what it printed last."""
        self.process.wait(SECONDS)
        wait_for(lambda: self.lines)
        return self.lines[-1]

    def result(self) -> Undisturbed:
        last = wait_for(lambda: next((line for line in self.lines if "result" in line), None), seconds=SECONDS)
        return Undisturbed(**last["result"])

    def node_of(self, task: str, *, after: int = 0) -> str:
        """Wait until a task runs on a node, and return the beginning of the node's id."""
        began = f"{task} runs on "

        def find() -> str:
            said = [str(line.get("line", "")) for line in self.lines[after:]]
            places = [line.removeprefix(began).split()[0] for line in said if line.startswith(began)]
            return places[-1].rpartition("/")[2] if places else ""

        return str(wait_for(find, seconds=SECONDS))

    def wait_for_runs(self, stage: str, number: int = 1) -> None:
        wait_for(lambda: self.runs().count(stage) >= number, seconds=SECONDS)


def variables(home: Path) -> dict[str, str]:
    path = os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]])
    return {"PYTHONPATH": path, "SLIPWAY_TEST_STAGES": str(home)}


@contextmanager
def export(home: Path, address: str, name: str, *before: str) -> Iterator[Command]:
    """Run an export until the block ends, with a folder of its own in the one that controls the stages on the nodes."""
    (home / name).mkdir(exist_ok=True)
    engine = {"SLIPWAY_HOME": str(home / name), "SLIPWAY_ENGINE": f"ray:{address}"}
    with (home / name / "export.log").open("ab") as log:
        process = subprocess.Popen(
            [*before, sys.executable, "-P", on_engine.__file__, "x"],
            env={**os.environ, **variables(home), **engine},
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield Command(home, process)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that controls the stages of all nodes."""
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[RayCluster]:
    with ray_cluster(home, nodes=2, **variables(home)) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return reference(tmp_path_factory.mktemp("reference") / "home", ["x"])["x"]


def test_nodes_die_and_the_artifacts_are_those_of_one_process(
    home: Path, cluster: RayCluster, undisturbed: Undisturbed
) -> None:
    with ExitStack() as stack:
        held = {stage: TinyStages(home).hold(stage) for stage in ("merge", "onnx_export")}
        command = stack.enter_context(export(home, cluster.address, "nodes"))
        for task in ("merge", "onnx_export"):
            command.wait_for_runs(task)
            at = command.node_of(task)
            lines = len(command.lines)
            cluster.kill_node(next(node for node in cluster.nodes if node.startswith(at)))
            command.wait_for_runs(task, 2)  # on the other node, long before the lease of the first would have ended
            assert command.node_of(task, after=lines) != at
            held[task].unlink()
            cluster.add_node()
        random.seed()
        cluster.kill_node(random.choice(cluster.nodes))  # whatever runs there
        assert command.result() == undisturbed
        assert command.last()["attempts"] == {task: [""] for task in undisturbed.tasks}
        cluster.add_node()


def test_a_command_that_was_killed_finds_its_workers_again(
    home: Path, cluster: RayCluster, undisturbed: Undisturbed
) -> None:
    before = len(TinyStages(home).runs())
    held = TinyStages(home).hold("merge")
    with export(home, cluster.address, "killed") as command:
        command.node_of("merge")
        wait_for(lambda: "merge" in command.runs()[before:], seconds=SECONDS)
        command.process.kill()
        command.process.wait()
    with export(home, cluster.address, "killed") as command:
        wait_for(lambda: command.lines, seconds=SECONDS)
        held.unlink()
        assert command.result() == undisturbed
    assert TinyStages(home).runs()[before:].count("merge") == 1


def test_a_command_that_is_ended_leaves_nothing_on_the_cluster(home: Path, cluster: RayCluster) -> None:
    before = len(TinyStages(home).runs())
    held = TinyStages(home).hold("merge")
    with export(home, cluster.address, "ended") as command:
        wait_for(lambda: "merge" in command.runs()[before:], seconds=SECONDS)
        command.process.terminate()
        assert command.process.wait(SECONDS) != 0
    wait_for(lambda: not workers_of("exports/x:merge"))
    assert cluster.named_actors() == []  # each would keep its place on a node
    held.unlink()


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    with export(tmp_path, f"127.0.0.1:{free_port()}", "away") as command:
        assert command.last()["reason"] == "ENGINE_UNAVAILABLE"


def test_a_store_that_nodes_do_not_see_is_refused_before_anything_runs(home: Path, cluster: RayCluster) -> None:
    """The command has another file system at this path, as another machine has."""
    store = home / "own" / "store"
    store.mkdir(parents=True)
    hidden = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs "{store}" && exec "$@"', "sh")
    before = TinyStages(home).runs()
    with export(home, cluster.address, "own", *hidden) as command:
        command.process.wait(SECONDS)
        if "not permitted" in (home / "own" / "export.log").read_text():
            pytest.skip("mounting a file system needs privileges")
        last = command.last()
    assert last["reason"] == "ENGINE_UNFIT"
    for node in cluster.nodes:
        assert f"/{node[:8]}: the artifact store {store} is not the same folder there" in last["message"]
    assert TinyStages(home).runs() == before


def workers_of(attempt: str) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if attempt in " ".join(one.info["cmdline"] or ())]


def test_an_export_goes_on_when_the_head_is_lost_and_repeats_nothing_that_was_finished(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    held, port = TinyStages(tmp_path).hold("onnx_export"), free_port()
    with ExitStack() as stack:
        first = stack.enter_context(ray_cluster(tmp_path, nodes=1, port=port, **variables(tmp_path)))
        with export(tmp_path, first.address, "home") as command:
            command.wait_for_runs("onnx_export")
            finished = [stage for stage in command.runs() if stage != "onnx_export"]
            first.kill_head()
            stack.close()
            held.unlink()
            with ray_cluster(tmp_path, nodes=1, port=port, **variables(tmp_path)) as second:
                assert second.address == first.address
                assert command.result() == undisturbed
    assert "merge" in finished
    for stage in set(finished):
        assert command.runs().count(stage) == max(1, len([one for one in undisturbed.tasks if one.startswith(stage)]))
