"""The state of each task while an export runs: the data behind every progress display."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipway.rpc.state_names import export_state, task_state
from slipway.rpc.statuses import failure_of_status
from slipway_protos.v1 import export_pb2 as pb

_SMOOTHING = 0.3
"""Weight of the newest speed; lower is smoother."""

_SHORTEST_SECONDS = 0.2
"""Speeds are not measured over a shorter time."""

_STALLED_SECONDS, _STALLED_STEPS = 10.0, 5
"""A phase that has not moved for so long, and for so many times its last step, has no known speed."""

ENDED = frozenset({"succeeded", "failed", "cancelled"})


@dataclass
class Row:
    """One task.

    Attributes:
        task: Id of the task.
        stage: Name of its stage; empty while unknown.
        format: Output that it delivers; empty for none.
        state: State, as in :func:`task_state`.
        attempt: Number of the newest attempt; 0 before the first.
        phase: Current phase.
        done: Completed part of ``total`` (0 while unknown), counted in ``unit``.
        memory_bytes: Memory of the stage's processes now; the peak after the end.
        started: Start of the newest attempt, in seconds since the epoch; None before.
        ended: End of the newest attempt; None before.
        reused: Whether the result already existed.
        kept: Whether an earlier run of this command made the result.
        reason: Reason of a failure; empty otherwise.
        rate: Units per second, smoothed; None while unknown, also after a phase has not moved for long.
    """

    task: str
    stage: str = ""
    format: str = ""
    state: str = "waiting"
    attempt: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    memory_bytes: int = 0
    started: float | None = None
    ended: float | None = None
    reused: bool = False
    kept: bool = False
    reason: str = ""
    rate: float | None = None
    _measured: tuple[float, int] | None = None
    _step_seconds: float = 0.0

    @property
    def ended_for_good(self) -> bool:
        """Return whether the task will not change again in this run."""
        return self.state in ENDED or self.state == "skipped"

    def advance(self, report: pb.TaskProgress, now: float) -> None:
        """Take a progress report."""
        done = report.done
        if report.phase != self.phase or done < self.done:
            self.rate, self._measured, self._step_seconds = None, None, 0.0
        if self._measured is None:
            self._measured = (now, done)
        else:
            self._measure(done, now, *self._measured)
        self.phase, self.done, self.total, self.unit = report.phase, done, report.total, report.unit
        self.memory_bytes = report.memory_bytes or self.memory_bytes

    def _measure(self, done: int, now: float, before: float, done_before: int) -> None:
        """Update the speed, given when and where it was measured before. Reports without a step only tell how long the step takes."""
        seconds = now - before
        stalled = seconds > max(_STALLED_SECONDS, _STALLED_STEPS * self._step_seconds)
        if done == done_before:
            self.rate = None if stalled else self.rate
        elif stalled and self._step_seconds:  # what the phase waited for says nothing about its speed
            self._measured = (now, done)
        elif seconds >= _SHORTEST_SECONDS:
            speed = (done - done_before) / seconds
            self.rate = speed if self.rate is None else self.rate + _SMOOTHING * (speed - self.rate)
            self._measured, self._step_seconds = (now, done), seconds

    def remaining_seconds(self) -> float | None:
        """Return the time to the end of the phase at its present speed; None while unknown."""
        if self.state != "running" or not self.rate or not self.total:
            return None
        return max(self.total - self.done, 0) / self.rate

    def elapsed_seconds(self, now: float) -> float | None:
        """Return the duration of the newest attempt so far; None before its start."""
        return None if self.started is None else max((self.ended or now) - self.started, 0.0)


@dataclass
class Rows:
    """All tasks of an export, in the plan's order, updated by events.

    Attributes:
        clock: Function that returns seconds since the epoch.
        resuming: Whether the command may continue an earlier run; tasks that the first event shows as ended then count as kept.
        state: State of the export, as in :func:`export_state`.
        tasks: Rows by task id.
    """

    clock: Callable[[], float] = time.time
    resuming: bool = False
    state: str = ""
    tasks: dict[str, Row] = field(default_factory=dict)

    def take(self, event: pb.ExportEvent) -> list[Row]:
        """Update the rows from an event; return those whose state changed."""
        match event.WhichOneof("event"):
            case "export":
                first, self.state = not self.state, export_state(event.export.state)
                changed = [row for task in event.export.tasks if (row := self._task(task)) is not None]
                for row in changed:
                    row.kept = row.kept or (self.resuming and first and row.state in ENDED)
                return changed
            case "progress":
                report = event.progress
                self.tasks.setdefault(report.task, Row(report.task, state="running")).advance(report, self.clock())
        return []

    def _task(self, task: pb.Task) -> Row | None:
        row = self.tasks.setdefault(task.id, Row(task.id))
        row.stage, row.format = task.stage, task.format
        before = (row.state, row.attempt)
        row.state = task_state(task.state)
        row.kept = row.kept and row.state in ENDED
        if task.attempts:
            attempt = task.attempts[-1]
            if attempt.number != row.attempt:
                row.phase, row.done, row.total, row.rate = "", 0, 0, None
            row.attempt = attempt.number
            row.started = _seconds(attempt, "start_time")
            row.ended = _seconds(attempt, "end_time")
            row.reused = attempt.reused
            row.memory_bytes = attempt.peak_memory_bytes or row.memory_bytes
            row.reason = failure_of_status(attempt.error).reason if attempt.HasField("error") else ""
        return row if (row.state, row.attempt) != before else None


def _seconds(message: Any, name: str) -> float | None:
    return getattr(message, name).ToNanoseconds() / 1e9 if message.HasField(name) else None
