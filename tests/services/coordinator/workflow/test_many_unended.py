"""A coordinator that takes over answers first and resumes the exports of the one before afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.workflow import runs
from support.coordinators.harness import Harness, state, tiny_export, tiny_task, wait_for

_LIMIT_SECONDS = 2.0


def unended(home: Path, count: int) -> list[ExportRecord]:
    """Leave exports that no worker took."""
    records = [tiny_export(f"e-{number}", tiny_task("m")) for number in range(count)]
    with Harness(home, with_worker=False) as harness:
        for record in records:
            harness.submit(record)
        board = harness.server.coordinator.broker.board
        wait_for(lambda: len(board.waiting) == count, seconds=300)
    return records


def test_it_answers_before_it_resumes_and_resumes_first_what_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = unended(tmp_path, 3)
    monkeypatch.setattr(runs, "_RESUME_PAUSE_SECONDS", 3600.0)  # the second waits for ever
    with Harness(tmp_path, with_worker=False) as harness:
        board = harness.server.coordinator.broker.board
        wait_for(lambda: len(board.waiting) == 1)
        assert state(harness.client.get_export(records[1].name)) == "running"
        assert state(harness.client.cancel_export(records[2].name)) == "cancelled"
        assert set(harness.server.coordinator.runs.unresumed) == {records[1].name}
        assert set(harness.server.coordinator.unended) == {records[0].name, records[1].name}
    monkeypatch.undo()
    with Harness(tmp_path) as harness:
        assert state(harness.finished(records[1].name)) in {"succeeded", "failed"}


@pytest.mark.slow
def test_it_answers_within_two_seconds_with_2000_unended_exports(tmp_path: Path) -> None:
    records = unended(tmp_path, 2000)
    began = time.monotonic()
    with Harness(tmp_path, with_worker=False) as harness:
        for record in records[-3:]:
            assert state(harness.client.get_export(record.name)) == "running"
        assert time.monotonic() - began < _LIMIT_SECONDS
        longest = 0.0
        board = harness.server.coordinator.broker.board
        while len(board.waiting) < len(records):  # and while it resumes
            asked = time.monotonic()
            harness.client.get_export(records[-1].name)
            longest = max(longest, time.monotonic() - asked)
            assert time.monotonic() - began < 600
            time.sleep(0.05)
        print(f"all resumed after {time.monotonic() - began:.0f} s, longest answer {longest:.2f} s")
        assert longest < _LIMIT_SECONDS
