"""Estimate the progress of a whole export, and its remaining time."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipway.cli.progress.rows import Row, Rows
from slipway.registry import known_stage, plays
from slipway.stage import Effort, Role

_OTHER_PHASE = (0.05, 0.9)
"""Range of a phase without a known one: a running task is never shown as complete, because uncounted phases may follow."""

_STEP = re.compile(r"\b(\d{1,9}) of (\d{1,9})\b")
"""The number of a step in a phase's name: ``output 3 of 5: onnx``."""

_MEANINGFUL_SECONDS, _MEANINGFUL_PART = 5.0, 0.05
"""The remaining time is shown only after an export has run this long and completed this share."""

_SETTLING_SECONDS = 5.0
"""Time in which an estimate moves most of the way to the newest figures."""


@dataclass
class Overall:
    """The completed share of an export. It falls only where tasks are added, or where some that had ended are run again.

    Attributes:
        task_bytes: Estimated output size of each task, from the preflight; if empty, tasks are weighted by stage alone.
        clock: Function that returns seconds since any fixed time.
        done: Completed share, from 0 to 1.
        tasks: Number of tasks.
    """

    task_bytes: Mapping[str, int] = field(default_factory=dict)
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
        if longer and share < self.done:  # more remains than did: the share and the speed so far no longer hold
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
        gigabytes = self.task_bytes.get(row.task, 0) / 1e9
        effort = _effort(row)
        if plays(row.stage, Role.VALIDATION):
            outputs = max(sum(1 for each in rows.tasks.values() if each.format and each is not row), 1)
            made = sum(self.task_bytes.get(each.task, 0) for each in rows.tasks.values() if each.format) / 1e9
            return (outputs + 1) * effort.seconds + made * effort.seconds_per_gb
        return effort.seconds + gigabytes * effort.seconds_per_gb


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
