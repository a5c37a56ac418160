"""What a program hears of an export, in which order, and the bars of a notebook; how it is ended from elsewhere."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import slipway
from slipway.errors import Failure, StageError
from slipway.exporting.interruption import InterruptibleObserver, Interruption
from slipway.exporting.observing import observing
from slipway.progress.notebook import NotebookDisplay
from slipway.progress.observer import Observer, Silent
from slipway.rpc.messages import log_line
from slipway.rpc.values import status_of
from slipway_protos.v1 import export_pb2 as pb
from support.commands.terminal import script_on_terminal

HOSTILE = "<script>alert(1)</script>\n\u202e"


def state(task: int, *, export: int = pb.EXPORT_STATE_RUNNING, reason: str = "") -> pb.ExportEvent:
    """Return an event in which the task ``merge`` has a state."""
    attempt = pb.Attempt(number=1, state=task)
    attempt.start_time.FromSeconds(100)
    if reason:
        attempt.error.CopyFrom(status_of(Failure(reason, "a message")))
    if task != pb.TASK_STATE_RUNNING:
        attempt.end_time.FromSeconds(107)
    made = pb.Task(id="merge", stage="merge", format="pytorch", state=task, attempts=[attempt])
    return pb.ExportEvent(export=pb.Export(state=export, tasks=[made]))


def report(done: int, *, phase: str = "merge") -> pb.ExportEvent:
    progress = pb.TaskProgress(task="merge", phase=phase, done=done, total=40, unit="tensors", memory_bytes=1 << 20)
    return pb.ExportEvent(progress=progress)


def line(message: str) -> pb.ExportEvent:
    said = log_line("warning", message)
    said.task = "merge"
    return pb.ExportEvent(log=said)


def tell_all(observer: Observer) -> None:
    observer.title("checkpoint-10 of run")
    observer.note("reading base: 3 %")
    observer.note("reading base: 3 %")
    observer.expect({"merge": 8.0})
    observer.note("")
    observer.event(state(pb.TASK_STATE_RUNNING))
    observer.event(report(10))
    observer.event(line("a warning"))
    observer.event(line("a warning"))
    observer.event(report(30))
    observer.event(state(pb.TASK_STATE_SUCCEEDED, export=pb.EXPORT_STATE_SUCCEEDED))
    observer.log(logging.WARNING, "of the export")


def test_a_program_hears_every_change_once_and_in_order(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[slipway.ExportProgress] = []
    with observing(seen.append, Interruption()) as observer:
        tell_all(observer)
    assert [(each.title, each.note, each.state) for each in seen] == [
        ("checkpoint-10 of run", "", ""),
        ("checkpoint-10 of run", "reading base: 3 %", ""),
        ("checkpoint-10 of run", "", ""),
        *[("checkpoint-10 of run", "", "running")] * 3,
        ("checkpoint-10 of run", "", "succeeded"),
    ]
    tasks = [each.tasks[0] for each in seen if each.tasks]
    assert [(task.state, task.phase, task.done) for task in tasks] == [
        ("running", "", 0),
        ("running", "merge", 10),
        ("running", "merge", 30),
        ("succeeded", "merge", 30),
    ]
    assert tasks[-1].seconds == 7
    assert [each.done for each in seen][-1] == 1
    assert [record.message for record in caplog.records] == ["merge: a warning", "of the export"]
    assert {record.name for record in caplog.records} == {"slipway.task", "slipway.export"}


def test_nobody_hears_anything_but_the_log(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with observing(False, Interruption()) as observer:
        tell_all(observer)
    assert type(observer) is Silent
    assert [record.message for record in caplog.records] == ["merge: a warning", "of the export"]
    assert capfd.readouterr() == ("", "")


def test_bars_are_lines_where_there_is_no_terminal_and_no_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    with observing(True, Interruption()) as observer:
        tell_all(observer)
    out, err = capfd.readouterr()
    assert out == ""
    assert [text.partition(" ")[2] for text in err.splitlines()] == [
        "checkpoint-10 of run",
        "reading base: 3 %",
        "merge: started",
        "merge: done in 7.0 s",
    ]


SIDE_BY_SIDE = """
from slipway.exporting.interruption import Interruption
from slipway.exporting.observing import observing
from slipway_protos.v1 import export_pb2 as pb

def run(observer, name):
    observer.title(f"title of {name}")
    for number in (pb.TASK_STATE_RUNNING, pb.TASK_STATE_SUCCEEDED):
        task = pb.Task(id=name, stage="merge", state=number, attempts=[pb.Attempt(number=1, state=number)])
        observer.event(pb.ExportEvent(export=pb.Export(state=pb.EXPORT_STATE_RUNNING, tasks=[task])))

with observing(True, Interruption()) as first:
    with observing(True, Interruption()) as second:
        run(second, "second")
    run(first, "first")
with observing(True, Interruption()) as third:
    run(third, "third")
"""


def test_on_a_terminal_only_one_export_at_a_time_has_bars(tmp_path: Path) -> None:
    screen = script_on_terminal(SIDE_BY_SIDE, home=tmp_path, width=80)
    assert screen.code == 0, screen.text
    lines = [line.partition(" ")[2] for line in screen.lines if line[2:3] == ":"]
    assert lines == ["title of second", "second: started", "second: done"]
    assert {line.split()[1] for line in screen.lines if "━" in line} == {"first", "third"}


def test_a_notebook_has_a_bar_per_task_drawn_in_place() -> None:
    drawn: list[str] = []
    clock = [0.0]
    with NotebookDisplay(drawn.append, clock=lambda: clock[0]) as display:
        display.title(HOSTILE)
        display.event(state(pb.TASK_STATE_RUNNING))
        clock[0] += 1
        display.event(report(10, phase=HOSTILE))
        for done in range(11, 30):  # without a quarter of a second between them
            display.event(report(done, phase=HOSTILE))
        display.event(state(pb.TASK_STATE_FAILED, export=pb.EXPORT_STATE_FAILED, reason="OUT_OF_MEMORY"))
        display.note("delivering")
    assert len(drawn) == 5
    assert '<progress max="1" value="0.250"></progress>' in drawn[2]
    assert "10/40 tensors" in drawn[2]
    assert "OUT_OF_MEMORY" in drawn[3]
    assert "1.0 MB · 7.0 s" in drawn[3]
    for text in drawn:
        assert "&lt;script&gt;" in text
        assert "<script" not in text
        assert "\u202e" not in text
        assert "\n" not in text


def test_an_error_of_the_program_ends_the_export_with_it() -> None:
    interruption = Interruption()

    def fail(progress: slipway.ExportProgress) -> None:
        raise LookupError("enough")

    with observing(fail, interruption) as inner:
        observer = InterruptibleObserver(inner, interruption)
        with pytest.raises(LookupError, match="enough") as first:
            observer.title("x")
        with pytest.raises(LookupError) as caught:  # another thread's next word
            observer.note("y")
    assert caught.value is first.value


def test_a_request_ends_what_waits_and_all_that_follows() -> None:
    interruption, waiting = Interruption(), threading.Event()

    def wait() -> None:
        with interruption.ending(waiting.set):
            assert waiting.wait(60)
            raise ConnectionError("closed")  # what a closed connection would raise

    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(wait)
        interruption.request()
        with pytest.raises(StageError) as caught:
            work.result()
    assert (caught.value.reason, bool(caught.value.remedy)) == ("CANCELLED", True)
    with pytest.raises(StageError), interruption.ending(lambda: None):
        pytest.fail("begun after the request")
    observer = InterruptibleObserver(Silent(), interruption)
    calls: list[tuple[Any, Any]] = [
        (observer.title, ""), (observer.note, ""), (observer.expect, {}), (observer.event, pb.ExportEvent()),
    ]  # fmt: skip
    for call, value in calls:
        with pytest.raises(StageError):
            call(value)


def test_who_waits_for_a_turn_can_be_ended_too() -> None:
    first, second, notes = Interruption(), Interruption(), list[str]()

    def wait() -> None:
        with second.turn(notes.append):
            pytest.fail("both at once")

    with first.turn(notes.append), ThreadPoolExecutor(1) as pool:
        work = pool.submit(wait)
        while not notes:
            pass
        second.request()
        with pytest.raises(StageError, match="interrupted"):
            work.result()
    assert notes == ["waiting for another export of this process"]
    with Interruption().turn(notes.append):
        assert len(notes) == 1


@pytest.mark.parametrize("bad", [slipway.export_async, slipway.plan_async])
async def test_errors_come_out_of_the_asynchronous_functions(bad: Any) -> None:
    with pytest.raises(slipway.ConfigurationError, match=r"base_model\.name"):
        await asyncio.wait_for(bad(), 60)
