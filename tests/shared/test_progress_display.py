"""Progress: what rows say after events, and how it is shown."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from logs_kept import logs_kept
from slipway.cli.display import LineDisplay, LiveDisplay
from slipway.cli.remote_view import answer_export
from slipway.cli.rows import Rows
from slipway.cli.table import progress_table
from slipway.errors import Failure
from slipway.wire import status_of
from slipway_protos.v1 import export_pb2 as pb


def state(**tasks: pb.Attempt | int) -> pb.ExportEvent:
    """An event with tasks in a state, or with an attempt in one."""
    export = pb.Export(state=pb.EXPORT_STATE_RUNNING)
    for name, given in tasks.items():
        attempts = [given] if isinstance(given, pb.Attempt) else []
        export.tasks.add(id=name, state=given.state if isinstance(given, pb.Attempt) else given, attempts=attempts)
    return pb.ExportEvent(export=export)


def attempt(number: int, state: int, **more: object) -> pb.Attempt:
    made = pb.Attempt(number=number, state=state, **more)
    made.start_time.FromSeconds(100)
    if state not in {pb.TASK_STATE_RUNNING, pb.TASK_STATE_QUEUED}:
        made.end_time.FromSeconds(107)
    return made


def progress(task: str, done: int, total: int = 0, phase: str = "merging") -> pb.ExportEvent:
    report = pb.TaskProgress(task=task, phase=phase, done=done, total=total, unit="bytes", memory_bytes=1 << 20)
    return pb.ExportEvent(progress=report)


def test_speed_and_time_left_follow_the_reports() -> None:
    clock = [0.0]
    rows = Rows(clock=lambda: clock[0])
    rows.take(state(merge=attempt(1, pb.TASK_STATE_RUNNING)))
    for _ in range(20):
        clock[0] += 1
        rows.take(progress("merge", int(clock[0]) * 1000, total=40_000))
    row = rows.tasks["merge"]
    assert row.rate == pytest.approx(1000)
    assert row.remaining_seconds() == pytest.approx(20)
    assert row.elapsed_seconds(130.0) == 30
    rows.take(progress("merge", 0, phase="storing"))
    assert row.remaining_seconds() is None


def test_a_new_attempt_starts_over() -> None:
    rows = Rows()
    error = status_of(Failure("OUT_OF_MEMORY", "too large"))
    rows.take(state(merge=attempt(1, pb.TASK_STATE_RUNNING)))
    rows.take(progress("merge", 10, total=20))
    rows.take(state(merge=attempt(1, pb.TASK_STATE_FAILED, error=error, peak_memory_bytes=5 << 20)))
    row = rows.tasks["merge"]
    assert (row.state, row.reason, row.elapsed_seconds(999), row.memory_bytes) == (
        "failed",
        "OUT_OF_MEMORY",
        7,
        5 << 20,
    )
    rows.take(state(merge=attempt(2, pb.TASK_STATE_RUNNING)))
    assert (row.attempt, row.done, row.reason) == (2, 0, "")


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_say_each_change_once_and_progress_now_and_then() -> None:
    stream = io.StringIO()
    display = LineDisplay(stream)
    waiting = state(merge=pb.TASK_STATE_WAITING)
    display.event(waiting)
    display.event(waiting)
    display.event(state(merge=attempt(1, pb.TASK_STATE_RUNNING)))
    for done in range(100):
        display.event(progress("merge", done, total=100))
    display.event(state(merge=attempt(1, pb.TASK_STATE_SUCCEEDED, peak_memory_bytes=7)))
    said = lines(stream)
    changes = [(line["event"], line["state"]) for line in said if "state" in line]
    assert changes == [("export", "running"), ("task", "running"), ("task", "succeeded")]
    assert len([line for line in said if line["event"] == "progress"]) == 1
    assert (said[-1]["seconds"], said[-1]["peak_memory_bytes"]) == (7, 7)
    assert "reused" not in said[-1]


@pytest.mark.parametrize("resuming", [True, False])
def test_what_an_earlier_run_of_the_command_finished_counts_as_reused(resuming: bool) -> None:
    stream = io.StringIO()
    display = LineDisplay(stream, resuming=resuming)
    display.event(state(merge=attempt(1, pb.TASK_STATE_SUCCEEDED), onnx=pb.TASK_STATE_WAITING))
    display.event(state(merge=attempt(1, pb.TASK_STATE_SUCCEEDED), onnx=attempt(1, pb.TASK_STATE_SUCCEEDED)))
    by_task = {line["task"]: line.get("reused", False) for line in lines(stream) if line["event"] == "task"}
    assert by_task == {"merge": resuming, "onnx": False}


def test_an_export_that_is_looked_at_later_was_not_reused(capsys: pytest.CaptureFixture[str]) -> None:
    made, found = attempt(1, pb.TASK_STATE_SUCCEEDED), attempt(1, pb.TASK_STATE_SUCCEEDED, reused=True)
    answer_export(state(merge=made, onnx=found).export, as_json=False)
    merge, onnx = capsys.readouterr().out.splitlines()[-2:]
    assert "succeeded" in merge
    assert "reused" not in merge
    assert "reused" in onnx


def test_the_live_table_shows_every_task_and_logs_stay_whole() -> None:
    import logging

    from slipway.logs import configure_logs

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with logs_kept(), LiveDisplay(console) as display:
        configure_logs("info", console=console)
        display.event(state(merge=attempt(1, pb.TASK_STATE_RUNNING), onnx_export=pb.TASK_STATE_WAITING))
        display.event(progress("merge", 5_000_000, total=10_000_000))
        display.event(pb.ExportEvent(log=pb.LogLine(task="merge", level="warning", message="a long warning " * 3)))
        display.note("delivering")
        logging.getLogger("slipway.coordinator").info("noise that the table shows already")
    shown = stream.getvalue()
    assert "merge: " + ("a long warning " * 3).strip() in shown
    assert "5.0 MB/10.0 MB" in shown
    assert "onnx_export" in shown
    assert "noise" not in shown


def test_failed_and_reused_tasks_say_so() -> None:
    rows = Rows()
    error = status_of(Failure("UNSUPPORTED", "no"))
    rows.take(state(a=pb.TASK_STATE_WAITING, b=pb.TASK_STATE_WAITING))
    rows.take(
        state(a=attempt(1, pb.TASK_STATE_FAILED, error=error), b=attempt(2, pb.TASK_STATE_SUCCEEDED, reused=True))
    )
    stream = io.StringIO()
    Console(file=stream, width=120).print(progress_table(rows, now=110, note="a note"))
    shown = stream.getvalue()
    assert "UNSUPPORTED" in shown
    assert "reused (attempt 2)" in shown
    assert "7.0 s" in shown
    assert "a note" in shown
