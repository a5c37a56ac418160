"""A worker's resources: memory, GPU, libraries, their division among tasks, and whether the disk has room for another task."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipway.division import step_parameters
from slipway.errors import ConfigurationError
from slipway.execution.pressure import is_nearly_full
from slipway.machine.cgroup import ControlGroup, available_memory, usable_cores
from slipway.machine.processors import first_gpu, usable_gpus
from slipway.registry import load_stage
from slipway.sizes import format_size
from slipway_protos.v1 import worker_pb2

MEMORY_SHARE = 0.8

log = logging.getLogger("slipway.worker")

LOOK_SECONDS = 1.0
"""Interval of the checks for room on the disk. A task granted in between may find no space; then it continues on another worker."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of this machine, or of the container around this process.

    Attributes:
        cores: Cores this process may use.
        memory_bytes: Memory that was free at the start.
        scratch_bytes: Free space for work folders.
        gpu_architecture: For example ``sm89``; empty without a GPU.
        gpu_memory_bytes: Memory of the first GPU.
        gpus: Number of GPUs that tasks may use.
        libraries: Versions of the installed libraries that affect results of the worker's stages.
    """

    cores: int
    memory_bytes: int
    scratch_bytes: int
    gpu_architecture: str = ""
    gpu_memory_bytes: int = 0
    gpus: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)

    def default_slots(self) -> int:
        """Return the number of tasks to run side by side: independent branches gain, but each needs its own core and memory."""
        return 2 if self.cores > 1 and not self.gpu_architecture else 1

    def within(self, *, cores: int | None, memory_bytes: int | None) -> Machine:
        """Return the part of this machine that others leave to this process; None for no limit."""
        return replace(
            self,
            cores=min(self.cores, cores or self.cores),
            memory_bytes=min(self.memory_bytes or memory_bytes or 0, memory_bytes or self.memory_bytes),
        )

    def capabilities(self, *, slots: int) -> worker_pb2.Capabilities:
        """Return the capabilities to report; memory is the share of one of ``slots`` tasks."""
        return worker_pb2.Capabilities(
            gpu_architecture=self.gpu_architecture,
            gpu_memory_bytes=self.gpu_memory_bytes,
            gpus=self.gpus,
            memory_bytes=int(self.memory_bytes * MEMORY_SHARE / slots),
            scratch_bytes=self.scratch_bytes,
            versions=self.libraries,
            processors=self.cores,
        )


def probe(scratch: Path, stages: Iterable[str] = (), *, group: ControlGroup | None = None) -> Machine:
    """Examine this machine once.

    Args:
        scratch: Folder for work folders.
        stages: Stages whose libraries to list.
        group: This process's control group.
    """
    group = group or ControlGroup()
    gpu = first_gpu()
    return Machine(
        cores=usable_cores(group),
        memory_bytes=available_memory(group.memory()),
        scratch_bytes=shutil.disk_usage(scratch).free,
        gpu_architecture=gpu.architecture if gpu else "",
        gpu_memory_bytes=gpu.memory_bytes if gpu else 0,
        gpus=usable_gpus() if gpu else 0,
        libraries=installed_libraries(stages),
    )


def known_parameters(stages: Iterable[str]) -> dict[str, worker_pb2.StageParameters]:
    """Return the parameter names of each stage, without stages that accept any parameter."""
    parameters: dict[str, worker_pb2.StageParameters] = {}
    for name in stages:
        with contextlib.suppress(ConfigurationError):  # a task for this stage will report the error
            stage = load_stage(name)
            if stage.params.model_config.get("extra") != "allow":
                parameters[name] = worker_pb2.StageParameters(names=step_parameters(stage))
    return parameters


def installed_libraries(stages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed libraries that stages declare."""
    versions: dict[str, str] = {}
    for name in stages:
        with contextlib.suppress(ConfigurationError):  # a task for this stage will report the error
            versions |= load_stage(name).library_versions()
    return {name: version for name, version in sorted(versions.items()) if version}


class Room:
    """Watches the free space of one folder; logs when it runs out and when there is some again.

    Args:
        scratch: Folder for work folders; it exists.

    Attributes:
        enough: Whether there was room at the last check.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.enough = True

    def look(self) -> bool:
        """Check again; return whether the answer has changed."""
        try:
            disk = shutil.disk_usage(self._scratch)
        except OSError:  # the next task will report the fault
            return False
        before, self.enough = self.enough, not is_nearly_full(disk.free, total=disk.total)
        if self.enough == before:
            return False
        if self.enough:
            log.info(f"takes tasks again: {format_size(disk.free)} are free in {self._scratch}")
        else:
            log.warning(
                f"takes no tasks until there is room: {format_size(disk.free)} of {format_size(disk.total)} are left in "
                f"{self._scratch}; free some, lower SLIPWAY_CACHE_SIZE, or point SLIPWAY_SCRATCH to a larger disk"
            )
        return True

    def free_bytes(self) -> int:
        """Return the free bytes; 0 if unknown."""
        try:
            return shutil.disk_usage(self._scratch).free
        except OSError:
            return 0
