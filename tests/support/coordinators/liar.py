"""A worker that brings whatever it is told to."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import status_pb2

from slipway.rpc.call_ends import STATUS_KEY
from slipway.rpc.values import failure_of_status
from slipway_protos.v1 import worker_pb2, worker_pb2_grpc


class Liar:
    """A worker that brings whatever it is told to."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def lease(self, stage: str = "merge") -> worker_pb2.TaskLease:
        request = worker_pb2.SynchronizeRequest(worker_id="liar", stages=[stage], free_slots=1)
        request.max_wait.FromSeconds(20)
        (lease,) = self._stub.Synchronize(request).leases
        return lease

    def told_to_cancel(self, lease: worker_pb2.TaskLease) -> bool:
        """Report a task as running; returns whether the answer is to end it."""
        running = worker_pb2.RunningTask(task=lease.task, lease_epoch=lease.lease_epoch)
        request = worker_pb2.SynchronizeRequest(worker_id="liar", stages=["none"], running=[running])
        return lease.task in self._stub.Synchronize(request).cancel_tasks

    def bring(self, lease: worker_pb2.TaskLease, **outcome: Any) -> str:
        """Hand in a result; returns the reason of the refusal."""
        done = worker_pb2.CompleteTaskRequest(
            worker_id="liar", task=lease.task, lease_epoch=lease.lease_epoch, **outcome
        )
        try:
            self._stub.CompleteTask(done)
        except grpc.RpcError as error:
            status = next(value for key, value in error.trailing_metadata() if key == STATUS_KEY)
            return failure_of_status(status_pb2.Status.FromString(status)).reason
        return ""

    def close(self) -> None:
        self._channel.close()
