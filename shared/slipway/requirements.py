"""Requirements and preferences of a task for its worker, abilities of workers, and who may take a task. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from slipway.sizes import format_size

NO_GPU = "none"
"""Stands for workers without a GPU, in place of an architecture."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities that a worker reports.

    Attributes:
        stages: Stages that it runs.
        gpu_architecture: Architecture of its first GPU; empty without one.
        gpu_memory_bytes: Memory of that GPU.
        memory_bytes: Memory that one task may use.
        libraries: Versions of installed distributions.
        parameters: Names of the parameters that its version of each stage knows; a stage that is missing here takes any.
    """

    stages: frozenset[str]
    gpu_architecture: str = ""
    gpu_memory_bytes: int = 0
    memory_bytes: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def unknown(self, stage: str, parameters: frozenset[str]) -> frozenset[str]:
        """Return the parameters that this worker's version of a stage does not know."""
        return parameters - self.parameters[stage] if stage in self.parameters else frozenset()


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs that a worker must meet all together. A named architecture implies a GPU."""

    gpu: bool = False
    gpu_architectures: tuple[str, ...] = ()
    gpu_memory_bytes: int = 0
    memory_bytes: int = 0
    libraries: tuple[str, ...] = ()

    def met_by(self, worker: Abilities) -> bool:
        """Return whether a worker meets all needs."""
        return (
            self.possible_on(worker.gpu_architecture or NO_GPU)
            and worker.gpu_memory_bytes >= self.gpu_memory_bytes
            and worker.memory_bytes >= self.memory_bytes
            and all(worker.libraries.get(name) for name in self.libraries)
        )

    def possible_on(self, gpu_architecture: str) -> bool:
        """Return whether workers with such a GPU can meet the needs; :data:`NO_GPU` means workers without one."""
        if gpu_architecture == NO_GPU:
            return not (self.gpu or self.gpu_architectures or self.gpu_memory_bytes)
        return not self.gpu_architectures or gpu_architecture in self.gpu_architectures

    def __str__(self) -> str:
        parts = []
        if self.gpu_architectures:
            parts.append(f"a GPU of {' or '.join(self.gpu_architectures)}")
        elif self.gpu:
            parts.append("a GPU")
        if self.gpu_memory_bytes:
            parts.append(f"{format_size(self.gpu_memory_bytes)} of GPU memory")
        if self.memory_bytes:
            parts.append(f"{format_size(self.memory_bytes)} of memory for a task")
        return " and ".join([*parts, *self.libraries])


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of a task for its worker.

    Attributes:
        any_of: Alternatives, one of which must be met; if there are none, every worker with the stage qualifies.
        prefers: Preferences, most important first; the task goes to workers that meet them, as far as there are any.
    """

    any_of: tuple[Needs, ...] = ()
    prefers: tuple[Needs, ...] = ()

    def met_by(self, worker: Abilities) -> bool:
        """Return whether a worker can run the task."""
        return not self.any_of or any(needs.met_by(worker) for needs in self.any_of)

    def possible_on(self, gpu_architecture: str) -> bool:
        """Return whether workers with such a GPU can run the task; :data:`NO_GPU` means workers without one, empty all workers."""
        if not gpu_architecture or not self.any_of:
            return True
        return any(needs.possible_on(gpu_architecture) for needs in self.any_of)

    @property
    def uses_gpu(self) -> bool:
        """Whether the task needs a GPU, or goes to a worker with one if it can."""
        return not self.possible_on(NO_GPU) or not all(needs.possible_on(NO_GPU) for needs in self.prefers)


ANY = Requirements()
"""No requirements: every worker with the stage qualifies."""


class Lack(StrEnum):
    """What workers lack for a task that none of them takes; each is a reason of :mod:`slipway.reasons`."""

    STAGE = "NO_WORKER"
    ABILITY = "WORKER_UNFIT"
    VERSION = "WORKER_OUTDATED"
    READINESS = "WORKERS_DRAINING"


class Placement(NamedTuple):
    """The workers that an offer is for.

    Attributes:
        stage: Stage of the task.
        requirements: Requirements for workers.
        avoid: Names of workers that take the task only if no other worker can.
        parameters: Names of the parameters that a worker's version of the stage must know.
    """

    stage: str
    requirements: Requirements = ANY
    avoid: tuple[str, ...] = ()
    parameters: frozenset[str] = frozenset()

    def can(self, worker: Abilities) -> bool:
        """Return whether a worker is able to run the task."""
        return (
            self.stage in worker.stages
            and self.requirements.met_by(worker)
            and not worker.unknown(self.stage, self.parameters)
        )

    def candidates(self, known: Mapping[str, Abilities]) -> set[str]:
        """Return the names of the workers that the offer waits for.

        They are the workers that can run it, without those to avoid and reduced to the preferred ones, unless none would be left.
        """
        names = {name for name, worker in known.items() if self.can(worker)}
        names = names - set(self.avoid) or names
        for needs in self.requirements.prefers:
            names = {name for name in names if needs.met_by(known[name])} or names
        return names

    def lack(self, workers: Iterable[Abilities]) -> tuple[Lack, str]:
        """Return why no worker takes the task, and the same for people, with the needs of the task and the abilities of the workers."""
        serving = [worker for worker in workers if self.stage in worker.stages]
        if not serving:
            return Lack.STAGE, f"no worker runs the stage {self.stage}"
        able = sum(self.can(worker) for worker in serving)
        if able:
            return (
                Lack.READINESS,
                f"the workers that can run {self.stage} ({able}) take no new tasks: they are shutting down, or their disks are full",
            )
        fitting = [worker for worker in serving if self.requirements.met_by(worker)]
        unknown = sorted(set[str]().union(*(worker.unknown(self.stage, self.parameters) for worker in fitting)))
        if fitting:
            names = ", ".join(unknown)
            return (
                Lack.VERSION,
                f"the workers that run {self.stage} ({len(fitting)}) are of another version: they do not know {names}",
            )
        needs = " or ".join(str(needs) for needs in self.requirements.any_of)
        have = "; ".join(sorted({self._has(worker) for worker in serving}))
        return Lack.ABILITY, f"{self.stage} needs {needs}; its workers ({len(serving)}) have {have}"

    def lacking(self, workers: Iterable[Abilities]) -> str:
        """Say why no worker takes the task."""
        return self.lack(workers)[1]

    def _has(self, worker: Abilities) -> str:
        asked = self.requirements.any_of
        parts = [worker.gpu_architecture or "no GPU"]
        if any(needs.gpu_memory_bytes for needs in asked):
            parts.append(f"{format_size(worker.gpu_memory_bytes)} of GPU memory")
        if any(needs.memory_bytes for needs in asked):
            parts.append(f"{format_size(worker.memory_bytes)} of memory for a task")
        for name in sorted({name for needs in asked for name in needs.libraries}):
            version = worker.libraries.get(name)
            parts.append(f"{name} {version}" if version else f"no {name}")
        return ", ".join(parts)
