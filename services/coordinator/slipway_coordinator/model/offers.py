"""What the coordinator and its workers tell each other about work: offers, reports, leases. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipway.planning.matching import Call
from slipway.requirements import ANY, Abilities, Requirements


@dataclass(frozen=True, slots=True)
class Offer:
    """One attempt that shall run. ``max_memory_bytes`` 0 leaves the limit to the worker, ``threads`` 0 as well. Where it is
    ``checked``, only workers that know its parameters take it.

    Nobody begins it before ``not_before``, in seconds since the epoch. Given workers to ``avoid``, the others need not wait, and
    those begin it only when there are no others.
    """

    export: str
    task: str
    attempt: int
    stage: str
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    timeout_seconds: float = 0.0
    max_memory_bytes: int = 0
    memory_factor: float = 1.0
    threads: int = 0
    exclusive: bool = False
    traceparent: str = ""
    priority: int = 0
    not_before: float = 0.0
    avoid: tuple[str, ...] = ()
    requirements: Requirements = ANY
    checked: bool = True

    @property
    def call(self) -> Call:
        """Which workers it is for."""
        parameters = frozenset(self.params) if self.checked else frozenset[str]()
        return Call(self.stage, self.requirements, self.avoid, parameters)

    @property
    def project(self) -> str:
        """Whose export it is."""
        return self.export.split("/")[1]

    @property
    def key(self) -> str:
        """Name of the attempt across exports: ``{export}:{task}:{attempt}``."""
        return f"{self.export}:{self.task}:{self.attempt}"


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker says it runs."""

    task: str
    epoch: int

    @property
    def export(self) -> str:
        """Name of the export it is of."""
        return self.task.partition(":")[0]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of itself with every call; ``draining`` while it takes no new tasks, ``ending`` when it never will again."""

    worker: str
    stages: frozenset[str]
    free_slots: int = 0
    draining: bool = False
    ending: bool = False
    memory_bytes: int = 0
    gpu_architecture: str = ""
    gpu_memory_bytes: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    running: tuple[Held, ...] = ()

    @property
    def abilities(self) -> Abilities:
        """What it can be given."""
        return Abilities(
            self.stages,
            self.gpu_architecture,
            self.gpu_memory_bytes,
            self.memory_bytes,
            dict(self.libraries),
            dict(self.parameters),
        )


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease as the worker gets it."""

    offer: Offer
    epoch: int
    max_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker shall do: start these, end those."""

    granted: tuple[Granted, ...] = ()
    cancel: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to do and who does it.

    Attributes:
        waiting: Stage and seconds of waiting, for each attempt that waits.
        leased: Stage of each attempt that runs.
        served: Every stage of every worker that reported lately.
    """

    waiting: tuple[tuple[str, float], ...] = ()
    leased: tuple[str, ...] = ()
    served: tuple[str, ...] = ()


def memory_limit(offer: Offer, report: WorkerReport) -> int:
    """Bytes for the attempt: the configured limit or the worker's own, times the recovery rules' factor; 0 if neither is known."""
    return int((offer.max_memory_bytes or report.memory_bytes) * offer.memory_factor)
