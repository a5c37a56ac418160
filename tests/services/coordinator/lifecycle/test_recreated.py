"""An export is deleted and created again under its name: what comes late from its first life changes nothing in its second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from slipway_protos.v1 import worker_pb2, worker_pb2_grpc
from support.coordinators.harness import Harness, state, tiny_export, tiny_task, wait_for

FORMER, LATTER = (f"sha256:{digit * 64}" for digit in "ab")
NAME = "projects/default/exports/twice"
Lease = worker_pb2.TaskLease


class Worker:
    """One worker process, which reports only what it is told to."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)

    def synchronize(self, *running: Lease, free: int = 0) -> worker_pb2.SynchronizeResponse:
        request = worker_pb2.SynchronizeRequest(worker_id="w", stages=["theirs"], free_slots=free)
        request.running.extend(worker_pb2.RunningTask(task=one.task, lease_epoch=one.lease_epoch) for one in running)
        return self._stub.Synchronize(request)

    def asked(self) -> Lease:
        """The task that waits, once it does."""
        granted: list[Lease] = []
        wait_for(lambda: granted.extend(self.synchronize(free=1).leases) or granted)
        return granted[0]

    def hand_in(self, lease: Lease, digest: str) -> grpc.StatusCode:
        request = worker_pb2.CompleteTaskRequest(worker_id="w", task=lease.task, lease_epoch=lease.lease_epoch)
        request.output.outputs["out"] = digest
        try:
            self._stub.CompleteTask(request)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, with_worker=False, options={"workers_gone": False, "lease_seconds": 0.5}) as running:
        yield running


@pytest.fixture
def worker(harness: Harness) -> Iterator[Worker]:
    with grpc.insecure_channel(harness.address) as channel:
        yield Worker(channel)


def submit(harness: Harness) -> None:
    harness.submit(tiny_export("twice", tiny_task("t", stage="theirs")))


def test_a_late_result_of_the_first_life_is_refused_in_the_second(harness: Harness, worker: Worker) -> None:
    submit(harness)
    former = worker.asked()
    harness.client.cancel_export(NAME)
    wait_for(lambda: state(harness.client.get_export(NAME)) == "cancelled")  # its worker is silent
    harness.client.delete_export(NAME)
    submit(harness)
    assert worker.hand_in(former, FORMER) is grpc.StatusCode.FAILED_PRECONDITION, "nobody has it yet"
    latter = worker.asked()
    assert latter.task == former.task
    assert worker.hand_in(former, FORMER) is grpc.StatusCode.FAILED_PRECONDITION, "the same worker has it again"
    assert latter.lease_epoch > former.lease_epoch
    assert worker.synchronize(former).cancel_tasks == [former.task]
    assert not worker.synchronize(latter).cancel_tasks
    assert worker.hand_in(latter, LATTER) is grpc.StatusCode.OK
    wait_for(lambda: state(harness.client.get_export(NAME)) == "succeeded")
    (task,) = harness.client.get_export(NAME).tasks
    assert dict(task.outputs) == {"out": LATTER}
    assert worker.hand_in(former, FORMER) is grpc.StatusCode.FAILED_PRECONDITION
