"""Real workers that join a coordinator of this process, each with a machine that a test describes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from slipway.execution.runner import TaskRunner
from slipway.settings.security import Security
from slipway.worker.machine import Machine
from slipway.worker.pull import Worker, WorkerOptions
from support.coordinators.harness import STAGE, Harness, wait_for

MACHINE = Machine(cores=3, memory_bytes=8 << 30, scratch_bytes=64 << 30)


class JoinedWorker:
    """A worker on an event loop of its own; it leaves by :meth:`leave`, or without a word by :meth:`vanish`."""

    def __init__(self, harness: Harness, security: Security | None, machine: Machine, **options: Any) -> None:
        self._harness, self._started = harness, Future[None]()
        self.machine = machine
        self.options = WorkerOptions(harness.address, security=security, report_seconds=0.1, **options)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._started.result(60)

    def leave(self) -> None:
        """Say goodbye and end."""
        self._on_loop(self.worker.stop)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def vanish(self) -> None:
        """End as a machine does that loses its power."""
        self._on_loop(self._pulling.cancel)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def drain(self) -> None:
        """Take no more tasks, as if the disk were nearly full."""

        def drain() -> None:
            self.worker.room.enough = False
            self.worker._changed.set()

        self._on_loop(drain)

    def _on_loop(self, function: Any) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(function)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        runner = TaskRunner(self._harness.store, self._harness.home / f"scratch-{self.options.worker_id}")
        self.worker = Worker(self.options, runner, self.machine)
        self._pulling = asyncio.create_task(self.worker.run())
        self._started.set_result(None)
        await asyncio.wait([self._pulling])


@contextmanager
def joined(
    harness: Harness,
    worker_id: str,
    *,
    stages: tuple[str, ...] = (STAGE,),
    security: Security | None = None,
    machine: Machine = MACHINE,
    slots: int = 1,
) -> Iterator[JoinedWorker]:
    """Run a worker that has joined until the block ends, if it has not left before."""
    worker = JoinedWorker(
        harness, security, machine, stages=stages, slots=slots, worker_id=worker_id, waits_for_room=False
    )
    try:
        wait_for(
            lambda: any(name.endswith(worker_id) for name in list(harness.server.coordinator.broker.board.workers))
        )
        yield worker
    finally:
        worker.leave()
