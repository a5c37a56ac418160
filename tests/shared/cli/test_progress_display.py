"""Progress: the state of rows after events, and its display."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
from datetime import UTC, datetime

import pytest
from rich.console import Console

from slipway.cli.remote.view import print_export
from slipway.errors import Failure
from slipway.observability.logs import command_logs, json_handler, terminal_handler
from slipway.progress.display import LineDisplay, LiveDisplay, Pace
from slipway.progress.rendering import JsonLines, PlainLines, progress_table
from slipway.progress.rows import Overall, Rows
from slipway.rpc.values import status_of
from slipway_protos.v1 import export_pb2 as pb


def state(**tasks: pb.Attempt | int) -> pb.ExportEvent:
    """Return an event in which each task has a state or an attempt."""
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


def test_a_phase_that_stalls_has_no_time_left_instead_of_an_absurd_one() -> None:
    clock, left = [0.0], []
    rows = Rows(clock=lambda: clock[0])
    rows.take(state(merge=attempt(1, pb.TASK_STATE_RUNNING)))
    row = rows.tasks["merge"]

    def report(done: int) -> None:
        clock[0] += 1
        rows.take(progress("merge", done, total=40_000))
        left.append(row.remaining_seconds())

    for step in range(1, 21):
        report(step * 1000)
    for _ in range(300):  # reports go on, because they tell the memory too
        report(20_000)
    assert left[19:29] == [pytest.approx(20)] * 10
    assert left[31:] == [None] * len(left[31:])
    for step in range(21, 25):
        report(step * 1000)
    assert left[-1] == pytest.approx(16), "it moves again, at its own speed"
    assert max(seconds for seconds in left if seconds is not None) < 100


def test_slow_steps_are_no_stall() -> None:
    clock = [0.0]
    rows = Rows(clock=lambda: clock[0])
    rows.take(state(merge=attempt(1, pb.TASK_STATE_RUNNING)))
    for second in range(1, 141):
        clock[0] = float(second)
        rows.take(progress("merge", second // 30, total=10))
        if second > 61:
            assert rows.tasks["merge"].remaining_seconds() == pytest.approx((10 - second // 30) * 30, rel=0.05)


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


def test_a_state_that_only_a_newer_peer_knows_is_shown_by_its_number() -> None:
    rows = Rows()
    rows.take(pb.ExportEvent(export=pb.Export(state=77, tasks=[pb.Task(id="merge", state=78)])))
    assert (rows.state, rows.tasks["merge"].state) == ("state 77", "state 78")


@pytest.mark.parametrize("phase", [" ", f"output 1 of {'9' * 5000}", f"output {'9' * 5000} of 1"])
def test_a_phase_may_be_any_text(phase: str) -> None:
    rows, overall = Rows(), Overall()
    rows.take(state(merge=attempt(1, pb.TASK_STATE_RUNNING)))
    rows.take(progress("merge", 1, total=2, phase=phase))
    overall.update(rows)
    assert 0 < overall.done < 1


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_say_each_change_once_and_progress_now_and_then() -> None:
    stream = io.StringIO()
    display = LineDisplay(JsonLines(stream))
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
    for line in said:  # one form of time, and the keys that log lines have
        assert {"time", "level", "logger", "message", "event"} <= set(line)
        assert datetime.fromisoformat(str(line["time"])).tzinfo == UTC


@pytest.mark.parametrize("resuming", [True, False])
def test_what_an_earlier_run_of_the_command_finished_counts_as_reused(resuming: bool) -> None:
    stream = io.StringIO()
    display = LineDisplay(JsonLines(stream), resuming=resuming)
    display.event(state(merge=attempt(1, pb.TASK_STATE_SUCCEEDED), onnx=pb.TASK_STATE_WAITING))
    display.event(state(merge=attempt(1, pb.TASK_STATE_SUCCEEDED), onnx=attempt(1, pb.TASK_STATE_SUCCEEDED)))
    by_task = {line["task"]: line.get("reused", False) for line in lines(stream) if line["event"] == "task"}
    assert by_task == {"merge": resuming, "onnx": False}


def test_an_export_that_is_looked_at_later_was_not_reused(capsys: pytest.CaptureFixture[str]) -> None:
    made, found = attempt(1, pb.TASK_STATE_SUCCEEDED), attempt(1, pb.TASK_STATE_SUCCEEDED, reused=True)
    print_export(state(merge=made, onnx=found).export, as_json=False)
    merge, onnx = capsys.readouterr().out.splitlines()[-2:]
    assert "succeeded" in merge
    assert "reused" not in merge
    assert "reused" in onnx


def test_the_live_table_shows_every_task_and_logs_stay_whole() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    before = logging.getLogger("slipway").handlers
    with command_logs("info", terminal_handler(console)), LiveDisplay(console) as display:
        display.title("checkpoint-40 of h_half onto qwen3-base")
        display.event(state(merge=attempt(1, pb.TASK_STATE_RUNNING), onnx_export=pb.TASK_STATE_WAITING))
        display.event(progress("merge", 5_000_000, total=10_000_000))
        for task in ("merge", "merge", "onnx_export"):
            display.event(pb.ExportEvent(log=pb.LogLine(task=task, level="warning", message="a long warning " * 3)))
        display.note("delivering")
        logging.getLogger("slipway.coordinator").info("noise that the table shows already")
    assert logging.getLogger("slipway").handlers == before
    shown = stream.getvalue()
    assert "merge: " + ("a long warning " * 3).strip() in shown
    assert "5.0 MB/10.0 MB" in shown
    assert "onnx_export" in shown
    assert "noise" not in shown
    assert shown.count("WARNING") == 1, "a warning of a second attempt, or of another task, is not said again"
    assert "checkpoint-40 of h_half onto qwen3-base" in shown
    assert "total" in shown


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


def test_plain_lines_are_short_and_rare() -> None:
    stream, clock = io.StringIO(), [0.0]
    display = LineDisplay(PlainLines(stream), clock=lambda: clock[0])
    display.title("checkpoint-40 of h_half onto qwen3-base")
    display.event(state(merge=pb.TASK_STATE_WAITING, onnx=pb.TASK_STATE_WAITING))
    display.event(state(merge=attempt(1, pb.TASK_STATE_RUNNING), onnx=pb.TASK_STATE_WAITING))
    for step in range(600):  # one report each half second, of a phase of five minutes
        clock[0] += 0.5
        display.event(progress("merge", step * 1_000_000, total=600_000_000))
    error = status_of(Failure("OUT_OF_MEMORY", "too large"))
    display.event(state(merge=attempt(1, pb.TASK_STATE_FAILED, error=error)))
    display.event(state(merge=attempt(2, pb.TASK_STATE_SUCCEEDED)))
    display.event(state(onnx=attempt(1, pb.TASK_STATE_SUCCEEDED, reused=True)))
    said = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in said)
    texts = [line[9:] for line in said]
    assert texts[:2] == ["checkpoint-40 of h_half onto qwen3-base", "merge: started"]
    assert texts[-3:] == ["merge: failed in 7.0 s: OUT_OF_MEMORY", "merge: done in 7.0 s (attempt 2)", "onnx: reused"]
    steps = texts[2:-3]
    assert 8 <= len(steps) <= 12  # a line for each tenth, not one per report
    assert re.search(r"merging 5\d% \(3\d\d\.0 MB/600\.0 MB", "".join(steps))
    assert all(len(line) < 120 for line in said)


def test_a_phase_that_does_not_move_says_so_once_a_minute() -> None:
    clock = [0.0]
    pace = Pace(lambda: clock[0])
    due = []
    for second in range(200):
        clock[0] = float(second)
        due.append(pace.due("build", "tactics", None))
    assert [second for second, said in enumerate(due) if said] == [0, 60, 120, 180]


def test_logs_and_progress_have_one_form_as_json() -> None:
    stream = io.StringIO()
    with command_logs("info", json_handler(stream)):
        display = LineDisplay(JsonLines(stream))
        display.event(state(merge=attempt(1, pb.TASK_STATE_RUNNING)))
        display.event(pb.ExportEvent(log=pb.LogLine(task="merge", level="warning", message="rounded away")))
        display.note("delivering to out")
    said = lines(stream)
    assert [line["event"] for line in said] == ["export", "task", "log", "note"]
    assert len({tuple(sorted(set(line) & {"time", "level", "logger", "message"})) for line in said}) == 1
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", str(line["time"])) for line in said)


def whole() -> pb.ExportEvent:
    """Return an export with four waiting tasks."""
    export = pb.Export(state=pb.EXPORT_STATE_RUNNING)
    for name, stage in (("merge", "merge"), ("onnx", "onnx_export"), ("int4", "quantize"), ("validate", "validate")):
        export.tasks.add(id=name, stage=stage, format=name, state=pb.TASK_STATE_WAITING)
    return pb.ExportEvent(export=export)


def test_the_whole_only_moves_forward_and_tells_the_time_left_when_it_can() -> None:
    clock = [0.0]
    rows, overall = Rows(clock=lambda: clock[0]), Overall({"merge": 5.0, "onnx": 23.0}, clock=lambda: clock[0])
    event, seen, left = whole(), [0.0], []

    def look() -> None:
        rows.take(event)
        overall.update(rows)
        seen.append(overall.done)
        left.append(overall.remaining_seconds())

    look()
    assert (overall.done, left) == (0.0, [None])
    for number, task in enumerate(event.export.tasks):
        task.state = pb.TASK_STATE_RUNNING
        task.attempts.add(number=1, state=pb.TASK_STATE_RUNNING)
        for output in range(1, 4):
            for step in range(10):
                clock[0] += 0.5
                phase = f"output {output} of 3: x" if task.stage == "validate" else "merge"
                rows.take(progress(task.id, step, total=10, phase=phase))
                look()
        if number == 1:  # it fails, and begins again
            task.attempts.add(number=2, state=pb.TASK_STATE_RUNNING)
            look()
        task.state = pb.TASK_STATE_SUCCEEDED
        look()
    assert seen == sorted(seen), "the bar went back"
    assert overall.done == pytest.approx(1.0)
    told = [seconds for seconds in left if seconds is not None]
    assert len(told) > 60
    assert left[:8] == [None] * 8  # nothing is told before it means something
    half = left[len(left) // 2]
    assert half is not None
    assert 5 < half < 240  # 30 seconds are left; the stages' usual ratios speak for more
    assert told[-1] < half / 3, "the estimate does not follow what is measured"


def test_the_whole_falls_back_when_ended_tasks_are_run_again() -> None:
    clock = [0.0]
    rows, overall, event = Rows(clock=lambda: clock[0]), Overall(clock=lambda: clock[0]), whole()

    def look() -> float:
        rows.take(event)
        clock[0] += 10
        overall.update(rows)
        return overall.done

    look()
    for task in event.export.tasks:
        task.state = pb.TASK_STATE_SUCCEEDED
        look()
    again = next(task for task in event.export.tasks if task.stage not in {"merge", "validate"})
    again.state = pb.TASK_STATE_RUNNING
    again.attempts.add(number=2, state=pb.TASK_STATE_RUNNING)
    before = look()
    assert 0 < before < 0.9
    assert overall.remaining_seconds() is None, "the speed of the first run says nothing about the second"
    rows.take(progress(again.id, 9, total=10, phase="merge"))
    assert (seen := look()) > before
    event.export.tasks.add(id="calibrate", stage="calibrate", state=pb.TASK_STATE_RUNNING)
    assert look() < seen, "a task was added"


def test_a_validation_fills_the_bar_output_by_output() -> None:
    rows, overall, event = Rows(), Overall(), whole()
    for task in event.export.tasks:
        task.state = pb.TASK_STATE_SUCCEEDED if task.id != "validate" else pb.TASK_STATE_RUNNING
    rows.take(event)
    seen = []
    for output in range(1, 6):
        rows.take(progress("validate", 5, total=10, phase=f"output {output} of 5: onnx-int8"))
        overall.update(rows)
        seen.append(overall.done)
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert min(steps) > 0.05
    assert max(steps) == pytest.approx(min(steps))
