"""How far an export is as a whole, and about how long it still takes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipway.cli.progress.rows import Row, Rows

_SECONDS = {"prepare": 4.0, "combine": 3.0, "merge": 4.0, "quantize": 4.0, "onnx_export": 8.0, "tensorrt_build": 60.0}
_SECONDS_PER_GB = {"prepare": 10.0, "merge": 5.0, "quantize": 15.0, "onnx_export": 15.0, "tensorrt_build": 120.0}
_VALIDATE_SECONDS, _VALIDATE_SECONDS_PER_GB = 10.0, 40.0
"""What a stage takes, and more for each GB that it makes or validates. Only their ratio counts: it weights the tasks."""

_OTHER_SECONDS = 4.0
_PHASES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "merge": {"check": (0.0, 0.05), "merge": (0.05, 0.7), "verify": (0.7, 0.95)},
    "quantize": {"quantize": (0.05, 0.8), "cast": (0.05, 0.8), "check": (0.8, 0.95)},
    "onnx_export": {"graph": (0.1, 0.3), "weights": (0.3, 0.7), "parity": (0.7, 0.95)},
    "validate": {"tokenize": (0.0, 0.02), "reference": (0.02, 0.15), "output": (0.15, 0.97)},
}
"""Which share of a stage each of its phases is, by the phase's first word."""

_OTHER_PHASE = (0.05, 0.9)
"""A task that runs is never shown as all done: phases follow that its counter does not know."""

_STEP = re.compile(r"\b(\d+) of (\d+)\b")
"""A phase that says which part of the task it is: ``output 3 of 5: onnx``."""

_MEANINGFUL_SECONDS, _MEANINGFUL_PART = 5.0, 0.05
"""Before an export ran for so long and did so much of itself, no time left is told."""

_SETTLING_SECONDS = 5.0
"""In so long, an estimate follows most of the way to what the newest figures say."""


@dataclass
class Overall:
    """The share of an export that is done; it only grows.

    Attributes:
        task_bytes: Estimated size of what each task makes, as the preflight tells it; empty weights by stage alone.
        clock: Seconds, from any beginning.
        done: From 0 to 1.
        tasks: How many there are.
    """

    task_bytes: Mapping[str, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    done: float = 0.0
    tasks: int = 0
    _began: tuple[float, float] | None = None
    _left: float | None = None
    _looked: float = 0.0

    def look(self, rows: Rows) -> None:
        """Take what is known of the tasks now."""
        weights = {row.task: self._weight(row, rows) for row in rows.tasks.values()}
        whole, self.tasks = sum(weights.values()), len(weights)
        if not whole:
            return
        share = sum(weights[row.task] * _part(row) for row in rows.tasks.values()) / whole
        self.done = max(self.done, min(share, 1.0))
        self._estimate()

    def remaining_seconds(self) -> float | None:
        """About how long it still takes; None while that cannot be told."""
        if self._left is None or self.done >= 1:
            return None
        return max(self._left - (self.clock() - self._looked), 0.0)

    def _estimate(self) -> None:
        now = self.clock()
        if self._began is None:  # what an earlier run did says nothing about the speed of this one
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
        if row.stage == "validate":
            outputs = max(sum(1 for each in rows.tasks.values() if each.format and each is not row), 1)
            made = sum(self.task_bytes.get(each.task, 0) for each in rows.tasks.values() if each.format) / 1e9
            return (outputs + 1) * _VALIDATE_SECONDS + made * _VALIDATE_SECONDS_PER_GB
        return _SECONDS.get(row.stage, _OTHER_SECONDS) + gigabytes * _SECONDS_PER_GB.get(row.stage, 0.0)


def _part(row: Row) -> float:
    """The share of one task that is done."""
    if row.ended_for_good:
        return 1.0
    if row.state != "running" or not row.phase:
        return 0.0
    first, last = _PHASES.get(row.stage, {}).get(row.phase.split()[0], _OTHER_PHASE)
    within = min(row.done / row.total, 1.0) if row.total else 0.0
    step = _STEP.search(row.phase)
    if step is not None and 0 < int(step[1]) <= int(step[2]):
        within = (int(step[1]) - 1 + within) / int(step[2])
    return first + (last - first) * within if row.total or step else 0.0
