"""The gauges of a worker."""

from __future__ import annotations

from collections.abc import Iterator

from slipway.observability import metrics
from slipway.worker.pull import Worker


class Gauges:
    """Gauges of a worker's slots, tasks, memory and disk."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self) -> Iterator[metrics.Sample]:
        """Yield the samples of this moment. Safe from any thread."""
        yield metrics.SLOTS, {}, self._worker.options.slots
        yield metrics.WITHOUT_ROOM, {}, not self._worker.room.enough
        yield metrics.SCRATCH_FREE, {}, self._worker.room.free_bytes()
        running = self._worker.running()
        for stage in sorted(self._worker.options.stages):
            memory = [bytes_used for name, bytes_used in running if name == stage]
            yield metrics.RUNNING, {"stage": stage}, len(memory)
            yield metrics.STAGE_MEMORY, {"stage": stage}, sum(memory)
