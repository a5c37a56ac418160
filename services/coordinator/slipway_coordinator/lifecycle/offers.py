"""Plain values that the coordinator and its workers exchange: offers, reports, leases; and the offer of an attempt.

The record of an attempt is turned into its offer: its limits, and the workers it is for. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slipway.planning.references import AttemptKey, producers
from slipway.registry import IMPORT, known_stage, plays
from slipway.requirements import ANY, Abilities, Needs, Placement, Requirements
from slipway.stage import Role
from slipway.stage_call import Limits, StageCall
from slipway_coordinator.lifecycle.records import ExportRecord, TaskRecord

# Add headroom after an out-of-memory kill: the recorded peak is only a lower bound.
_AFTER_SHORTAGE = 1.5


@dataclass(frozen=True, slots=True)
class Offer:
    """One attempt that a worker may take.

    If ``checked``, only workers that know its parameters take it. It begins at ``not_before`` (seconds since the epoch) at the earliest.
    If there are workers to ``avoid``, other workers may begin at once; the avoided ones take it after that time, and only if no other
    worker can. ``key`` is the name of the attempt across exports; many tables have it, so it is one text.
    ``output`` names its only output; empty allows any.
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
    output: str = ""
    key: AttemptKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", AttemptKey.of(self.export, self.task, self.attempt))

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
    """A worker's report on itself, sent with every call. ``draining``: it takes no new tasks now; ``ending``: it never will again.

    ``only_task`` is the only attempt that it takes, for which an engine started it; None for a worker that takes any.

    ``slots`` and ``processors`` are 0 of a worker of an earlier version. ``held`` has the abridged digests of the artifacts on its machine;
    None if that is not known, or the same as before.
    """

    worker: str
    stages: frozenset[str]
    slots: int = 0
    free_slots: int = 0
    draining: bool = False
    ending: bool = False
    memory_bytes: int = 0
    gpu_architecture: str = ""
    gpu_memory_bytes: int = 0
    gpus: int = 0
    processors: int = 0
    scratch_bytes: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    running: tuple[Held, ...] = ()
    only_task: AttemptKey | None = None
    held: frozenset[int] | None = None

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


@dataclass(frozen=True, slots=True)
class ProjectLoad:
    """Waiting attempts, running attempts, and exports with such attempts, by the project's name in metrics."""

    waiting: Mapping[str, int]
    running: Mapping[str, int]
    exports: Mapping[str, int]


def memory_limit(offer: Offer, report: WorkerReport) -> int:
    """Return the attempt's memory limit: the configured or the worker's own, times the recovery factor; 0 if neither is known."""
    return int((offer.call.limits.max_memory_bytes or report.memory_bytes) * offer.memory_factor)


def offer_of(record: ExportRecord, task: TaskRecord, *, alone: bool = False) -> Offer:
    """Return the latest attempt of a task as an offer to workers.

    Args:
        record: The export.
        task: One of its tasks.
        alone: There will only ever be one worker. It gets every task, because the stage itself reports best what is missing.
    """
    attempt, resources = task.attempt, task.attempt.resources
    return Offer(
        export=record.name,
        task=task.id,
        attempt=attempt.number,
        call=StageCall(task.stage, attempt.params, attempt.inputs, _limits(record, task)),
        memory_factor=resources.memory_factor,
        exclusive=resources.exclusive,
        traceparent=record.traceparent,
        priority=record.priority,
        not_before=attempt.not_before,
        avoid=attempt.avoid,
        requirements=Requirements() if alone else requirements_of(record, task),
        checked=not alone,
        output=task.output,
    )


def requirements_of(record: ExportRecord, task: TaskRecord) -> Requirements:
    """Return the plan's requirements of a worker, refined by engine targets, sizes and memory shortages that are known by now."""
    prefers = [_narrow(needs, record, task) for needs in task.requirements.prefers]
    model_bytes = max(
        (
            int(one.facts.get("output_bytes", 0))
            for one in record.tasks
            if plays(one.stage, Role.MERGE, Role.PREPARATION)
        ),
        default=0,
    )
    stage = known_stage(task.stage)
    gpu_memory = int(model_bytes * stage.hardware.gpu_memory) if stage is not None else 0
    if gpu_memory and any(needs.gpu for needs in task.requirements.any_of):
        prefers.append(Needs(gpu_memory_bytes=gpu_memory))
    memory = int(model_bytes * stage.hardware.memory) if stage is not None else 0
    memory = max(memory, int(_peak_at_shortage(record, task) * _AFTER_SHORTAGE))
    if memory:
        prefers.append(Needs(memory_bytes=memory))
    return replace(task.requirements, prefers=tuple(prefers))


def _narrow(needs: Needs, record: ExportRecord, task: TaskRecord) -> Needs:
    """Narrow a preference for any GPU to the architectures that the task's engines were built for."""
    if not needs.gpu or needs.gpu_architectures:
        return needs
    makers = producers(task.inputs)
    built = [one for one in record.tasks if one.id in makers and _is_gpu_bound(one.stage)]
    targets = sorted({str(target) for one in built for target in one.facts.get("targets", ())})
    return replace(needs, gpu_architectures=tuple(targets))


def _is_gpu_bound(name: str) -> bool:
    stage = known_stage(name)
    return stage is not None and stage.hardware.gpu_bound_output


def _peak_at_shortage(record: ExportRecord, task: TaskRecord) -> int:
    """Return the task's highest memory peak among attempts of this run that ran out of memory."""
    peaks = [
        attempt.peak_memory_bytes
        for attempt in task.attempts
        if attempt.run == record.run and attempt.failure is not None and attempt.failure.reason == "OUT_OF_MEMORY"
    ]
    return max(peaks, default=0)


def _limits(record: ExportRecord, task: TaskRecord) -> Limits:
    """Return the latest attempt's limits: the configuration's, as changed by recovery."""
    settings, resources = record.configuration.get("resources", {}), task.attempt.resources
    seconds = settings.get("stage_timeouts", {}).get(task.stage, settings.get("stage_timeout_seconds", 0))
    return Limits(
        timeout_seconds=seconds * resources.timeout_factor,
        max_memory_bytes=settings.get("max_memory_bytes", 0),
        threads=resources.threads or settings.get("threads", 0),
    )
