"""Metrics of the tasks that a worker ran."""

from __future__ import annotations

from slipway.execution.runner import TaskResult
from slipway.observability import metrics


def observe(stage: str, result: TaskResult, *, seconds: float) -> None:
    """Count a task that ended."""
    if result.reused:
        return
    metrics.STAGE_SECONDS.observe(seconds, stage=stage, outcome="succeeded" if result.failure is None else "failed")
    if result.peak_memory_bytes:
        metrics.STAGE_PEAK.observe(result.peak_memory_bytes, stage=stage)
