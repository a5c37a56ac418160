"""Carry a task's inputs and outputs from and to the store, in threads that stop with the task.

Inputs come side by side, or a task would wait for one after the other, each alone too small to fill the network.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self, TypeVar

from slipway.errors import StageError
from slipway.execution.supervisor import OnProgress
from slipway.observability import metrics
from slipway.observability.telemetry import span
from slipway.stage import Progress

MOST_AT_ONCE = 3
"""Inputs of a task that are fetched at the same time. Each has the connections and threads that one alone has."""

_VERBS = {"fetched": "fetching", "stored": "storing"}
_T = TypeVar("_T")


async def transfer(
    direction: str, calls: Mapping[str, Callable[..., _T]], *, stage: str, on_progress: OnProgress
) -> dict[str, _T]:
    """Make calls of the store side by side, and return their results by name, in the order of the calls.

    The first error ends the others, and is raised once they have ended. Cancelling does the same: nothing is written after this returns.

    Args:
        direction: ``fetched`` or ``stored``.
        calls: By the name of the input or output; each takes ``on_bytes``.
        stage: Name of the stage, for metrics.
        on_progress: Gets the sum of the bytes.
    """
    if not calls:
        return {}
    places = asyncio.Semaphore(MOST_AT_ONCE)
    verb = _VERBS[direction]
    with _Phase(f"{verb} {next(iter(calls))}" if len(calls) == 1 else f"{verb} inputs", on_progress) as phase:

        async def carry(name: str, call: Callable[..., _T]) -> _T:
            async with places:
                one, began = _Count(phase), time.monotonic()
                with span(f"{verb} {name}") as recorded:
                    result = await _in_thread(call, one, phase)
                    recorded.set(**{"slipway.bytes": one.done})
            metrics.TRANSFERRED.add(one.done, stage=stage, direction=direction)
            metrics.TRANSFER_SECONDS.observe(time.monotonic() - began, direction=direction)
            return result

        carried = [asyncio.create_task(carry(name, call)) for name, call in calls.items()]
        try:
            return dict(zip(calls, await asyncio.gather(*carried), strict=True))
        except BaseException:
            phase.stop()
            for each in carried:
                each.cancel()
            await asyncio.gather(*carried, return_exceptions=True)
            raise


async def _in_thread(call: Callable[..., _T], one: _Count, phase: _Phase) -> _T:
    work = asyncio.ensure_future(asyncio.to_thread(call, on_bytes=one))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        phase.stop()
        await asyncio.gather(work, return_exceptions=True)
        raise


class _Phase:
    """The bytes of one or several transfers, counted in their threads and reported on the event loop."""

    def __init__(self, name: str, on_progress: OnProgress) -> None:
        self._name = name
        self._on_progress = on_progress
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._done = 0
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._report(0)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the transfers end at their next chunk, and report nothing any more."""
        self._stopped.set()

    def add(self, count: int) -> None:
        """Count bytes; raise in the thread of a transfer that should end."""
        if self._stopped.is_set():
            raise StageError("cancelled", reason="CANCELLED")
        with self._lock:
            self._done += count
            done = self._done
        self._loop.call_soon_threadsafe(self._report, done)

    def _report(self, done: int) -> None:
        if not self._stopped.is_set():
            self._on_progress(Progress(phase=self._name, done=done, total=0, unit="bytes"), 0)


class _Count:
    """The bytes of one transfer, whose parts come in several threads."""

    def __init__(self, phase: _Phase) -> None:
        self.done = 0
        self._phase = phase
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self.done += count
        self._phase.add(count)
