"""The gauges of a worker."""

from __future__ import annotations

from collections.abc import Iterator

from slipway.observability import metrics
from slipway.worker.pull import Worker


def gauges(worker: Worker) -> Iterator[metrics.Sample]:
    """Yield the samples of this moment: slots, tasks, memory and disk. Safe from any thread."""
    yield metrics.SLOTS, {}, worker.options.slots
    yield metrics.WITHOUT_ROOM, {}, not worker.room.enough
    yield metrics.SCRATCH_FREE, {}, worker.room.free_bytes()
    running = worker.running()
    for stage in sorted(worker.options.stages):
        memory = [bytes_used for name, bytes_used in running if name == stage]
        yield metrics.RUNNING, {"stage": stage}, len(memory)
        yield metrics.STAGE_MEMORY, {"stage": stage}, sum(memory)
