"""From the record of an attempt to the offer of it: its limits, and which workers it is for. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipway.registry import known_stage, plays
from slipway.requirements import Needs, Requirements
from slipway.stage import Role
from slipway_coordinator.model.offers import Offer
from slipway_coordinator.model.records import ExportRecord, TaskRecord

# What was too little by an unknown amount; the peak is that of the moment before the end.
_AFTER_SHORTAGE = 1.5


def offer_of(record: ExportRecord, task: TaskRecord, *, alone: bool = False) -> Offer:
    """The latest attempt of a task as an offer to workers.

    Args:
        record: The export.
        task: One of its tasks.
        alone: There is one worker, and there never will be another: the stage itself says best what is missing.
    """
    settings = record.configuration.get("resources", {})
    attempt, resources = task.attempt, task.attempt.resources
    return Offer(
        export=record.name,
        task=task.id,
        attempt=attempt.number,
        stage=task.stage,
        params=attempt.params,
        inputs=attempt.inputs,
        timeout_seconds=_timeout(settings, task.stage) * resources.timeout_factor,
        max_memory_bytes=settings.get("max_memory_bytes", 0),
        memory_factor=resources.memory_factor,
        threads=resources.threads or settings.get("threads", 0),
        exclusive=resources.exclusive,
        traceparent=record.traceparent,
        priority=record.priority,
        not_before=attempt.not_before,
        avoid=attempt.avoid,
        requirements=Requirements() if alone else requirements_of(record, task),
        checked=not alone,
    )


def requirements_of(record: ExportRecord, task: TaskRecord) -> Requirements:
    """What the plan asks of a worker, with what is known by now: what engines were built for, sizes, and memory that was short."""
    prefers = [_narrowed(needs, record, task) for needs in task.requirements.prefers]
    model_bytes = max(
        (
            int(one.facts.get("output_bytes", 0))
            for one in record.tasks
            if plays(one.stage, Role.MERGE, Role.PREPARATION)
        ),
        default=0,
    )
    stage = known_stage(task.stage)
    gpu_memory = int(model_bytes * stage.model_gpu_memory) if stage is not None else 0
    if gpu_memory and any(needs.gpu for needs in task.requirements.any_of):
        prefers.append(Needs(gpu_memory_bytes=gpu_memory))
    memory = int(model_bytes * stage.model_memory) if stage is not None else 0
    memory = max(memory, int(_peak_at_shortage(record, task) * _AFTER_SHORTAGE))
    if memory:
        prefers.append(Needs(memory_bytes=memory))
    return replace(task.requirements, prefers=tuple(prefers))


def _narrowed(needs: Needs, record: ExportRecord, task: TaskRecord) -> Needs:
    """A GPU that is preferred for an engine is one of those the engine was built for."""
    if not needs.gpu or needs.gpu_architectures:
        return needs
    makers = {reference.partition(":")[2].partition("/")[0] for reference in task.inputs.values()}
    built = [one for one in record.tasks if one.id in makers and _is_gpu_bound(one.stage)]
    targets = sorted({str(target) for one in built for target in one.facts.get("targets", ())})
    return replace(needs, gpu_architectures=tuple(targets))


def _is_gpu_bound(name: str) -> bool:
    stage = known_stage(name)
    return stage is not None and stage.gpu_bound_output


def _peak_at_shortage(record: ExportRecord, task: TaskRecord) -> int:
    """The most memory that the task had in this run when there was no more."""
    peaks = [
        attempt.peak_memory_bytes
        for attempt in task.attempts
        if attempt.run == record.run and attempt.failure is not None and attempt.failure.reason == "OUT_OF_MEMORY"
    ]
    return max(peaks, default=0)


def _timeout(settings: dict[str, Any], stage: str) -> float:
    """How long one attempt of a stage may take; 0 for any time."""
    return float(settings.get("stage_timeouts", {}).get(stage, settings.get("stage_timeout_seconds", 0)))
