"""What a worker offers: memory, GPU, and how its cores and memory are shared among tasks."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipway.gpu import first_gpu
from slipway_protos.v1 import worker_pb2

_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of this machine.

    Attributes:
        cores: Cores this process may use.
        memory_bytes: Memory that was free at the start.
        scratch_bytes: Free space for work folders.
        gpu_architecture: For example ``sm89``; empty without a GPU.
        gpu_memory_bytes: Of the first GPU.
    """

    cores: int
    memory_bytes: int
    scratch_bytes: int
    gpu_architecture: str = ""
    gpu_memory_bytes: int = 0

    def default_slots(self) -> int:
        """Tasks to run side by side: independent branches profit, but each needs a core and memory of its own."""
        return 2 if self.cores > 1 and not self.gpu_architecture else 1

    def capabilities(self, *, slots: int) -> worker_pb2.Capabilities:
        """What the coordinator is told; memory is what one of ``slots`` tasks may use."""
        return worker_pb2.Capabilities(
            gpu_architecture=self.gpu_architecture,
            gpu_memory_bytes=self.gpu_memory_bytes,
            memory_bytes=int(self.memory_bytes * _MEMORY_SHARE / slots),
            scratch_bytes=self.scratch_bytes,
        )


def probe(scratch: Path) -> Machine:
    """Look at this machine."""
    gpu = first_gpu()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().available,
        scratch_bytes=shutil.disk_usage(scratch).free,
        gpu_architecture=gpu.architecture if gpu else "",
        gpu_memory_bytes=gpu.memory_bytes if gpu else 0,
    )
