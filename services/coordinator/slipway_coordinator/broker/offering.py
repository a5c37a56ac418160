"""Turn the record of an attempt into its offer: its limits, and the workers it is for. Pure."""

from __future__ import annotations

from dataclasses import replace

from slipway.planning.references import producers
from slipway.registry import known_stage, plays
from slipway.requirements import Needs, Requirements
from slipway.stage import Role
from slipway.stage_call import Limits, StageCall
from slipway_coordinator.model.offers import Offer
from slipway_coordinator.model.records import ExportRecord, TaskRecord

# Add headroom after an out-of-memory kill: the recorded peak is only a lower bound.
_AFTER_SHORTAGE = 1.5


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
