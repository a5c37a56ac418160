"""The state of each task while an export runs, and the whole export's progress and remaining time: the data of every display."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipway.registry import known_stage, plays
from slipway.rpc.values import export_state, failure_of_status, task_state
from slipway.stage import Effort, Role
from slipway_protos.v1 import export_pb2 as pb

_SMOOTHING = 0.3
"""Weight of the newest speed; lower is smoother."""

_SHORTEST_SECONDS = 0.2
"""Speeds are not measured over a shorter time."""

_STALLED_SECONDS, _STALLED_STEPS = 10.0, 5
"""A phase that has not moved for so long, and for so many times its last step, has no known speed."""

ENDED = frozenset({"succeeded", "failed", "cancelled"})

_OTHER_PHASE = (0.05, 0.9)
"""Range of a phase without a known one: a running task is never shown as complete, because uncounted phases may follow."""

_STEP = re.compile(r"\b(\d{1,9}) of (\d{1,9})\b")
"""The number of a step in a phase's name: ``output 3 of 5: onnx``."""

_MEANINGFUL_SECONDS, _MEANINGFUL_PART = 5.0, 0.05
"""The remaining time is shown only after an export has run this long and completed this share."""

_SETTLING_SECONDS = 5.0
"""Time in which an estimate moves most of the way to the newest figures."""


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
        """Update the speed since the last measurement. A report without progress only shows how long the current step takes."""
        seconds = now - before
        stalled = seconds > max(_STALLED_SECONDS, _STALLED_STEPS * self._step_seconds)
        if done == done_before:
            self.rate = None if stalled else self.rate
        elif stalled and self._step_seconds:  # a wait says nothing about the speed
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


@dataclass
class Overall:
    """The completed share of an export. It falls only where tasks are added, or where some that had ended are run again.

    Attributes:
        task_seconds: Expected time of each task, from the preflight; a task that has none is weighted by its stage alone.
        clock: Function that returns seconds since any fixed time.
        done: Completed share, from 0 to 1.
        tasks: Number of tasks.
    """

    task_seconds: Mapping[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    done: float = 0.0
    tasks: int = 0
    _began: tuple[float, float] | None = None
    _left: float | None = None
    _ended: frozenset[str] = frozenset()
    _looked: float = 0.0

    def update(self, rows: Rows) -> None:
        """Update the share and the remaining time from the tasks' present state."""
        weights = {row.task: self._weight(row, rows) for row in rows.tasks.values()}
        whole = sum(weights.values())
        ended = frozenset(row.task for row in rows.tasks.values() if row.ended_for_good)
        longer = not self._ended <= ended or len(weights) > self.tasks
        self.tasks, self._ended = len(weights), ended
        if not whole:
            return
        share = min(sum(weights[row.task] * _part(row) for row in rows.tasks.values()) / whole, 1.0)
        if longer and share < self.done:  # there is more to do than before, so the old share and speed no longer hold
            self.done, self._began, self._left = share, None, None
        self.done = max(self.done, share)
        self._estimate()

    def remaining_seconds(self) -> float | None:
        """Return the estimated remaining time; None while unknown."""
        if self._left is None or self.done >= 1:
            return None
        return max(self._left - (self.clock() - self._looked), 0.0)

    def _estimate(self) -> None:
        now = self.clock()
        if self._began is None:  # the results of an earlier run say nothing about the speed of this one
            self._began = (now, self.done)
        seconds, part = now - self._began[0], self.done - self._began[1]
        if seconds < _MEANINGFUL_SECONDS or part < _MEANINGFUL_PART:
            return
        newest = seconds * (1 - self.done) / part
        expected = None if self._left is None else max(self._left - (now - self._looked), 0.0)
        share = 1 - math.exp(-(now - self._looked) / _SETTLING_SECONDS)
        self._left = newest if expected is None else expected + share * (newest - expected)
        self._looked = now

    def _weight(self, row: Row, rows: Rows) -> float:
        if row.task in self.task_seconds:
            return self.task_seconds[row.task]
        outputs = sum(1 for each in rows.tasks.values() if each.format and each is not row)
        return _effort(row).expected_seconds(0, times=max(outputs, 1) + 1 if plays(row.stage, Role.VALIDATION) else 1)


def _effort(row: Row) -> Effort:
    stage = known_stage(row.stage)
    return Effort() if stage is None else stage.effort


def _part(row: Row) -> float:
    """Return the completed share of one task."""
    if row.ended_for_good:
        return 1.0
    if row.state != "running" or not row.phase:
        return 0.0
    first, last = _effort(row).phases.get(row.phase.partition(" ")[0], _OTHER_PHASE)
    within = min(row.done / row.total, 1.0) if row.total else 0.0
    step = _STEP.search(row.phase)
    if step is not None and 0 < int(step[1]) <= int(step[2]):
        within = (int(step[1]) - 1 + within) / int(step[2])
    return first + (last - first) * within if row.total or step else 0.0
