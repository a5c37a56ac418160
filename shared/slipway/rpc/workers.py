"""Describe the workers of a coordinator for people."""

from __future__ import annotations

from typing import NamedTuple

from slipway.sizes import format_size
from slipway_protos.v1 import coordinator_pb2 as pb


class WorkerTexts(NamedTuple):
    """A worker as texts; what it has not said, and what it has not, is empty."""

    name: str
    state: str
    tasks: str
    stages: str
    task_memory: str
    processors: str
    gpu: str


def describe_worker(worker: pb.Worker) -> WorkerTexts:
    """Return a worker as texts."""
    machine = worker.machine
    gpu = f"{machine.gpu_architecture}, {format_size(machine.gpu_memory_bytes)}"
    return WorkerTexts(
        name=worker.name,
        state=pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower(),
        tasks=f"{worker.running_tasks} of {worker.slots}",
        stages=", ".join(worker.stages),
        task_memory=format_size(machine.task_memory_bytes) if machine.task_memory_bytes else "",
        processors=str(machine.processors or ""),
        gpu=gpu if machine.gpu_architecture else "",
    )
