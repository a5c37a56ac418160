"""Coordinator and workers as processes of their own, ended by kill -9 where it hurts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway_protos.v1 import export_pb2
from support import TINY_STAGES
from support.commands.cli import SLIPWAY
from support.coordinators.harness import TinyStages, coordinator_process, process, state, wait_for, worker_process
from support.servers.free_ports import free_port

SETTINGS = parse({"formats": {"onnx": {"enabled": False}}, "validation": {"compare_outputs": False}})


@dataclass
class Cluster(TinyStages):
    """A coordinator and workers over one home."""

    stack: ExitStack
    address: str

    def coordinator(self, *, lease_seconds: float = 4.0) -> subprocess.Popen[bytes]:
        return self.stack.enter_context(coordinator_process(self.home, self.address, lease_seconds=lease_seconds))

    def worker(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]])
        more = {"SLIPWAY_TEST_STAGES": str(self.home), "PYTHONPATH": path}
        return self.stack.enter_context(worker_process(self.home, self.address, "merge,quantize,validate", **more))

    def create(self, client: Client) -> str:
        return client.create_export(SETTINGS, sources=self.sources(), export_id="x").name

    def finished(self, client: Client, name: str) -> export_pb2.Export:
        return wait_for(lambda: ended(client, name), seconds=120)

    def logs(self) -> str:
        return (self.home / "coordinator.log").read_text() + (self.home / "worker.log").read_text()


def ended(client: Client, name: str) -> export_pb2.Export | None:
    try:
        export = client.get_export(name)
    except ModelExportError as error:
        assert error.reason == "COORDINATOR_UNAVAILABLE"
        return None
    return export if state(export) in {"succeeded", "failed", "cancelled"} else None


def kill(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [], "a killed process left children behind"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack, f"127.0.0.1:{free_port()}")


def connect(cluster: Cluster) -> Client:
    client = cluster.stack.enter_context(Client(cluster.address))

    def answers() -> bool:
        try:
            list(client.list_exports())
        except ModelExportError:
            return False
        return True

    wait_for(answers)
    return client


@pytest.mark.slow
def test_a_killed_coordinator_adopts_what_runs(cluster: Cluster) -> None:
    lease_seconds = 10.0  # more than a worker waits before it calls again
    hold = cluster.hold("merge")
    first, _ = cluster.coordinator(lease_seconds=lease_seconds), cluster.worker()
    client = connect(cluster)
    name = cluster.create(client)
    wait_for(lambda: cluster.runs() == ["merge"])
    kill(first)
    time.sleep(lease_seconds + 1)
    cluster.coordinator(lease_seconds=lease_seconds)
    connect(cluster)
    # Whoever's report or table came first, what was not adopted after this would be taken back.
    time.sleep(lease_seconds + 2)
    assert cluster.runs() == ["merge"], cluster.logs()
    assert "taken back" not in cluster.logs()
    hold.unlink()
    export = cluster.finished(client, name)
    assert state(export) == "succeeded", cluster.logs()
    assert cluster.runs() == ["merge", "validate"]
    assert len(export.tasks[0].attempts) == 1


@pytest.mark.slow
def test_an_export_outlives_its_worker_and_two_coordinators(cluster: Cluster) -> None:
    """Its task moves to another worker, whose result is made while no coordinator is there; and what ended is still known."""
    hold = cluster.hold("merge")
    coordinator, worker = cluster.coordinator(), cluster.worker()
    client = connect(cluster)
    with process(
        [SLIPWAY, "coordinator", "--state", str(cluster.home / "state.db")],
        cluster.home / "second.log",
    ) as second:
        assert second.wait(60) == 7
    assert "COORDINATOR_LOCKED" in (cluster.home / "second.log").read_text()
    name = cluster.create(client)
    wait_for(lambda: cluster.runs() == ["merge"])
    kill(worker)
    cluster.worker()
    wait_for(lambda: cluster.runs() == ["merge", "merge"])
    kill(coordinator)
    hold.unlink()
    time.sleep(1)
    coordinator = cluster.coordinator()
    export = cluster.finished(client, name)
    assert state(export) == "succeeded", cluster.logs()
    assert cluster.runs() == ["merge", "merge", "validate"]
    assert list((cluster.home / "scratch").iterdir()) == []
    kill(coordinator)
    cluster.coordinator()
    again = wait_for(lambda: ended(client, name))
    assert again == export
    assert list(client.list_exports()) == [export]


@pytest.mark.slow
def test_a_terminated_worker_hands_its_task_back_at_once(cluster: Cluster) -> None:
    hold = cluster.hold("merge")
    cluster.coordinator(lease_seconds=600)  # nobody waits for the lease to expire
    first = cluster.worker()
    client = connect(cluster)
    name = cluster.create(client)
    wait_for(lambda: cluster.runs() == ["merge"])
    first.terminate()
    assert first.wait(60) == 0
    cluster.worker()
    wait_for(lambda: cluster.runs() == ["merge", "merge"])
    hold.unlink()
    assert state(cluster.finished(client, name)) == "succeeded", cluster.logs()
