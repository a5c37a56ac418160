"""What a task needs of its worker, what it would rather have, and what a worker has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_GPU = "none"
"""Stands for the workers without a GPU where an architecture is asked for."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a worker says it has.

    Attributes:
        stages: Stages it runs.
        gpu_architecture: Of its first GPU; empty without one.
        gpu_memory_bytes: Of the same.
        memory_bytes: What one task may use.
        libraries: Versions of distributions.
        parameters: Names of the parameters that its version of a stage takes, by stage; one that is missing takes any.
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
    """What a worker has to have, all of it. An architecture that is named needs a GPU too."""

    gpu: bool = False
    gpu_architectures: tuple[str, ...] = ()
    gpu_memory_bytes: int = 0
    memory_bytes: int = 0
    libraries: tuple[str, ...] = ()

    def met_by(self, worker: Abilities) -> bool:
        """Whether a worker has it."""
        return (
            self.possible_on(worker.gpu_architecture or NO_GPU)
            and worker.gpu_memory_bytes >= self.gpu_memory_bytes
            and worker.memory_bytes >= self.memory_bytes
            and all(worker.libraries.get(name) for name in self.libraries)
        )

    def possible_on(self, gpu_architecture: str) -> bool:
        """Whether workers with such a GPU can have it; :data:`NO_GPU` for those without."""
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
            parts.append(f"{gib(self.gpu_memory_bytes)} of GPU memory")
        if self.memory_bytes:
            parts.append(f"{gib(self.memory_bytes)} of memory for a task")
        return " and ".join([*parts, *self.libraries])


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a task asks of its worker.

    Attributes:
        any_of: One of these has to be met; when there are none, every worker of the stage will do.
        prefers: The task goes to workers that meet these, the first one first, as far as there are any.
    """

    any_of: tuple[Needs, ...] = ()
    prefers: tuple[Needs, ...] = ()

    def met_by(self, worker: Abilities) -> bool:
        """Whether a worker can do it."""
        return not self.any_of or any(needs.met_by(worker) for needs in self.any_of)

    def possible_on(self, gpu_architecture: str) -> bool:
        """Whether workers with such a GPU can do it; :data:`NO_GPU` for those without, empty for all."""
        if not gpu_architecture or not self.any_of:
            return True
        return any(needs.possible_on(gpu_architecture) for needs in self.any_of)


ANY = Requirements()
"""Every worker of the stage will do."""


def gib(count: int) -> str:
    """Return bytes in GiB, as a message has them."""
    return f"{count / (1 << 30):.1f} GiB"
