"""Several exports on one display: a row each, told from several threads, with numbers where names are alike."""

from __future__ import annotations

import io
import logging
import re
import threading

import pytest

from slipway.progress.display import LineDisplay
from slipway.progress.overview import Overview
from slipway.progress.rendering import PlainLines
from slipway.progress.rows import Rows
from slipway_protos.v1 import export_pb2 as pb

FAILED = pb.ExportEvent(export=pb.Export(state=pb.EXPORT_STATE_FAILED))


def event(state: pb.ExportState, merge: pb.TaskState, quantize: pb.TaskState) -> pb.ExportEvent:
    tasks = [
        pb.Task(id="merge", stage="merge", state=merge, attempts=[pb.Attempt(number=1, state=merge)]),
        pb.Task(id="quantize-int8", stage="quantize", state=quantize, attempts=[pb.Attempt(number=1, state=quantize)]),
    ]
    return pb.ExportEvent(export=pb.Export(state=state, tasks=tasks))


QUEUED = event(pb.EXPORT_STATE_QUEUED, pb.TASK_STATE_QUEUED, pb.TASK_STATE_QUEUED)
MERGING = event(pb.EXPORT_STATE_RUNNING, pb.TASK_STATE_RUNNING, pb.TASK_STATE_QUEUED)
QUANTIZING = event(pb.EXPORT_STATE_RUNNING, pb.TASK_STATE_SUCCEEDED, pb.TASK_STATE_RUNNING)
DONE = event(pb.EXPORT_STATE_SUCCEEDED, pb.TASK_STATE_SUCCEEDED, pb.TASK_STATE_SUCCEEDED)


class RowsKept(LineDisplay):
    """A display in lines that keeps what it was told of each row."""

    def __init__(self, stream: io.StringIO) -> None:
        super().__init__(PlainLines(stream))
        self.kept = Rows()
        self.phases: list[tuple[str, str, int]] = []

    def event(self, event: pb.ExportEvent) -> None:
        self.kept.take(event)
        if event.WhichOneof("event") == "progress":
            self.phases.append((event.progress.task, event.progress.phase, event.progress.done))
        super().event(event)


def test_each_export_is_a_row_with_its_share_and_state() -> None:
    stream = io.StringIO()
    display = RowsKept(stream)
    overview = Overview(display)
    first, second, third = (overview.open(name, number, 3) for number, name in enumerate(("a", "b", "a"), start=1))
    first.note("reading base: 40% of 2 GB")
    first.note("reading base: 60% of 2 GB")  # no new phase
    for each in (QUEUED, MERGING, QUANTIZING):
        first.event(each)
    second.event(FAILED)
    third.event(DONE)
    rows = display.kept.tasks
    assert list(rows) == ["a", "b", "a (3)"]
    assert [row.state for row in rows.values()] == ["running", "failed", "succeeded"]
    assert [phase for task, phase, _ in display.phases] == ["reading base: 40% of 2 GB", "merge", "quantize-int8"]
    shares = [done for *_, done in display.phases]
    assert shares == sorted(shares)
    assert 0 < shares[-1] < 100
    first.event(DONE)
    assert rows["a"].state == "succeeded"
    assert rows["a"].ended is not None
    said = [re.sub(r"^\S+ ", "", line) for line in stream.getvalue().splitlines()]
    assert said[0] == "3 exports"
    assert said.count("a: started") == 1
    assert "b: failed" in stream.getvalue()


def test_lines_for_the_log_name_their_export(caplog: pytest.LogCaptureFixture) -> None:
    overview = Overview(LineDisplay(PlainLines(io.StringIO())))
    row = overview.open("fr-en", 1, 2)
    with caplog.at_level(logging.INFO, "slipway"):
        row.log(logging.WARNING, "its base is not proven")
        row.log(logging.ERROR, "fr-en: [DISK_FULL] full")
    assert [record.message for record in caplog.records] == [
        "fr-en: its base is not proven",
        "fr-en: [DISK_FULL] full",
    ]


def test_threads_are_passed_on_one_at_a_time() -> None:
    inside, most = 0, 0

    class Counting(LineDisplay):
        def event(self, event: pb.ExportEvent) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            super().event(event)
            inside -= 1

    overview = Overview(Counting(PlainLines(io.StringIO())))
    rows = [overview.open(f"run-{number}", number, 8) for number in range(1, 9)]

    def tell(number: int) -> None:
        for each in (QUEUED, MERGING, QUANTIZING, DONE):
            rows[number].event(each)

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
