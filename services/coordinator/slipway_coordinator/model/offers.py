"""What the coordinator and its workers tell each other about work: offers, reports, leases. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipway.planning.attempt_keys import AttemptKey
from slipway.planning.matching import ANY, Abilities, Placement, Requirements
from slipway.stage_call import StageCall


@dataclass(frozen=True, slots=True)
class Offer:
    """One attempt that shall run. Where it is ``checked``, only workers that know its parameters take it.

    Nobody begins it before ``not_before``, in seconds since the epoch. Given workers to ``avoid``, the others need not wait, and
    those begin it only when there are no others.
    """

    export: str
    task: str
    attempt: int
    call: StageCall
    memory_factor: float = 1.0
    exclusive: bool = False
    traceparent: str = ""
    priority: int = 0
    not_before: float = 0.0
    avoid: tuple[str, ...] = ()
    requirements: Requirements = ANY
    checked: bool = True

    @property
    def stage(self) -> str:
        """Name of its stage."""
        return self.call.stage

    @property
    def placement(self) -> Placement:
        """Which workers it is for."""
        parameters = frozenset(self.call.params) if self.checked else frozenset[str]()
        return Placement(self.stage, self.requirements, self.avoid, parameters)

    @property
    def project(self) -> str:
        """Whose export it is."""
        return self.key.project

    @property
    def key(self) -> AttemptKey:
        """Name of the attempt across exports."""
        return AttemptKey.of(self.export, self.task, self.attempt)


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker says it runs."""

    task: AttemptKey
    epoch: int

    @property
    def export(self) -> str:
        """Name of the export it is of."""
        return self.task.export


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
    cancel: tuple[AttemptKey, ...] = ()


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
    return int((offer.call.limits.max_memory_bytes or report.memory_bytes) * offer.memory_factor)
