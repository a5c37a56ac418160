"""The report's page shows the parts of divided work as one line, and what went wrong with one on its own."""

from __future__ import annotations

from typing import Any

from slipway.results.report.parts import fold_parts
from slipway.results.result import AttemptResult


def attempt(task: str, number: int = 1, outcome: str = "succeeded", **more: Any) -> AttemptResult:
    _, _, part = task.partition(".part-")
    params = {"level": "int8", "parts": 3} | ({"part": int(part)} if part else {})
    return AttemptResult(task=task, stage="quantize", number=number, outcome=outcome, params=params, **more)


def test_parts_are_one_line_with_their_time_together() -> None:
    parts = [
        attempt(f"quantize-x.part-{number}", duration_seconds=10.0 * number, peak_memory_bytes=number)
        for number in (1, 2, 3)
    ]
    join = attempt("quantize-x", duration_seconds=1.0)
    [together, last] = fold_parts([*parts, join])
    assert together.task == "quantize-x: 3 of 3 parts"
    assert (together.duration_seconds, together.peak_memory_bytes) == (60.0, 3)
    assert together.params == {"level": "int8", "parts": 3}
    assert last is join


def test_a_part_that_failed_keeps_its_lines() -> None:
    failed = attempt("merge.part-2", outcome="failed", reason="STAGE_KILLED")
    again = attempt("merge.part-2", 2, rule="killed-again")
    shown = fold_parts([attempt("merge.part-1"), failed, again, attempt("merge.part-3"), attempt("merge")])
    assert [each.task for each in shown] == ["merge: 2 of 3 parts", "merge.part-2", "merge.part-2", "merge"]
    assert shown[1:3] == [failed, again]


def test_whole_tasks_are_shown_as_they_are() -> None:
    plain = [AttemptResult(task="merge", stage="merge", number=1, outcome="succeeded", params={"verify": "spot"})]
    assert fold_parts(plain) == plain
