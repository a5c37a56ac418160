"""A worker that ends says so: nothing is kept for it, and it is no replica. One that is only full comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from slipway.execution.runner import TaskRunner
from slipway.requirements import Needs, Requirements
from slipway.worker.machine import probe
from slipway.worker.pull import Worker, WorkerOptions
from slipway_protos.v1 import worker_pb2, worker_pb2_grpc
from support.coordinators.harness import STAGE as TINY
from support.coordinators.harness import Harness, state, tiny_export, tiny_task, wait_for

STAGE = "leased"
OFTEN_ENOUGH = {"lease_seconds": 36_000.0, "workers_gone": False}  # nobody is forgotten for being silent


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, with_worker=False, options=OFTEN_ENOUGH) as harness:
        yield harness


@pytest.fixture
def stub(harness: Harness) -> Iterator[worker_pb2_grpc.WorkerServiceStub]:
    with grpc.insecure_channel(harness.address) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)


def report(name: str, *, gib: int = 1, **said: object) -> worker_pb2.SynchronizeRequest:
    request = worker_pb2.SynchronizeRequest(worker_id=name, stages=[STAGE], **said)  # type: ignore[arg-type]
    request.capabilities.memory_bytes = gib << 30
    return request


def submit(harness: Harness, name: str, *, prefers_gib: int = 0) -> None:
    """An export of one task, which waits when this returns."""
    needs = (Needs(memory_bytes=prefers_gib << 30),) if prefers_gib else ()
    task = tiny_task("t", stage=STAGE).with_(requirements=Requirements(prefers=needs))
    harness.submit(tiny_export(name, task))
    wait_for(lambda: harness.server.coordinator.broker.board.waiting)


def test_a_worker_that_ends_says_so_last_even_when_it_was_idle(tmp_path: Path) -> None:
    with Harness(tmp_path, options=OFTEN_ENOUGH) as harness:
        board = harness.server.coordinator.broker.board
        assert board.workers
        harness.loop.call_soon_threadsafe(harness.worker.stop)
        wait_for(lambda: not board.workers)


def test_a_task_is_no_demand_while_its_worker_drains(tmp_path: Path) -> None:
    """As Kubernetes ends a worker that runs something: its pod is no replica from then on."""
    with Harness(tmp_path, with_worker=False, options=OFTEN_ENOUGH) as harness:
        options = WorkerOptions(harness.address, (TINY,), report_seconds=0.1, drain_seconds=3600)
        worker = Worker(options, TaskRunner(harness.store, tmp_path / "scratch"), probe(tmp_path, (TINY,)))
        running = asyncio.run_coroutine_threadsafe(worker.run(), harness.loop)
        board = harness.server.coordinator.broker.board
        task = tiny_task("t", sleep_seconds=120, unless=str(tmp_path / "gate"))
        name = harness.submit(tiny_export("long", task, base=harness.base()))
        wait_for(worker.running)
        assert board.demand({TINY}) == 1
        harness.loop.call_soon_threadsafe(worker.stop)
        wait_for(lambda: board.demand({TINY}) == 0)
        assert worker.running(), "it goes on with it"
        (tmp_path / "gate").touch()
        running.result(60)
        assert state(harness.finished(name)) == "succeeded"
        assert not board.workers


def test_nothing_waits_for_a_worker_that_has_ended(harness: Harness, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
    stub.Synchronize(report("large", gib=64))
    submit(harness, "a", prefers_gib=32)
    assert not stub.Synchronize(report("small", free_slots=1)).leases, "the large one has what it prefers"
    stub.Synchronize(report("large", gib=64, draining=True, ending=True))
    assert len(stub.Synchronize(report("small", free_slots=1)).leases) == 1


def test_what_ends_is_no_replica_and_what_is_full_is_one(
    harness: Harness, stub: worker_pb2_grpc.WorkerServiceStub
) -> None:
    board = harness.server.coordinator.broker.board
    submit(harness, "runs")
    (lease,) = stub.Synchronize(report("busy", free_slots=1)).leases
    submit(harness, "waits")
    assert board.demand({STAGE}) == 2
    busy = worker_pb2.RunningTask(task=lease.task, lease_epoch=lease.lease_epoch)
    stub.Synchronize(report("busy", draining=True, ending=True, running=[busy]))
    assert "busy" in board.workers, "it still runs something"
    assert board.demand({STAGE}) == 1, "it ends with what it runs"
    stub.Synchronize(report("full", draining=True))
    assert board.demand({STAGE}) == 2, "one that is of no use, and stays"
    done = worker_pb2.CompleteTaskRequest(worker_id="busy", task=lease.task, lease_epoch=lease.lease_epoch)
    done.output.outputs["out"] = "sha256:" + "0" * 64
    stub.CompleteTask(done)
    assert board.demand({STAGE}) == 2, "it ends, so nobody has to take its place"
    stub.Synchronize(report("busy", draining=True, ending=True))
    assert set(board.workers) == {"full"}
