"""Plain values that the coordinator and its workers exchange: offers, reports, leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipway.planning.attempt_keys import AttemptKey
from slipway.planning.matching import Placement
from slipway.registry import IMPORT
from slipway.requirements import ANY, Abilities, Requirements
from slipway.stage_call import StageCall


@dataclass(frozen=True, slots=True)
class Offer:
    """One attempt that a worker may take.

    If ``checked``, only workers that know its parameters take it. It begins at ``not_before`` (seconds since the epoch) at the earliest.
    If there are workers to ``avoid``, other workers may begin at once; the avoided ones take it after that time, and only if no other
    worker can.
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
        """Properties that decide which workers can take it."""
        parameters = frozenset(self.call.params) if self.checked else frozenset[str]()
        return Placement(self.stage, self.requirements, self.avoid, parameters)

    @property
    def addresses(self) -> frozenset[str]:
        """Addresses of the sources that it imports; empty for every other stage."""
        imports = self.call.params.get("imports", {}) if self.stage == IMPORT else {}
        return frozenset(filter(None, imports.values()))

    @property
    def project(self) -> str:
        """Project of the export."""
        return self.key.project

    @property
    def key(self) -> AttemptKey:
        """Name of the attempt across exports."""
        return AttemptKey.of(self.export, self.task, self.attempt)


@dataclass(frozen=True, slots=True)
class Held:
    """An attempt that a worker reports as running."""

    task: AttemptKey
    epoch: int

    @property
    def export(self) -> str:
        """Name of the attempt's export."""
        return self.task.export


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's report on itself, sent with every call. ``draining``: it takes no new tasks now; ``ending``: it never will again."""

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
        """Abilities that decide which attempts it can take."""
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
    """A lease as the worker receives it."""

    offer: Offer
    epoch: int
    max_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Response to a worker: leases to start and attempts to end."""

    granted: tuple[Granted, ...] = ()
    cancel: tuple[AttemptKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Waiting and running attempts, and the workers for them.

    Attributes:
        waiting: Stage and seconds of waiting, for each attempt that waits.
        leased: Stage of each attempt that runs.
        served: Every stage of every worker that reported recently.
    """

    waiting: tuple[tuple[str, float], ...] = ()
    leased: tuple[str, ...] = ()
    served: tuple[str, ...] = ()


def memory_limit(offer: Offer, report: WorkerReport) -> int:
    """Return the attempt's memory limit: the configured or the worker's own, times the recovery factor; 0 if neither is known."""
    return int((offer.call.limits.max_memory_bytes or report.memory_bytes) * offer.memory_factor)
