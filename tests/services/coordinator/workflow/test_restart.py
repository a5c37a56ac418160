"""Coordinators that stop, start again, or fail: each test has one of its own, as a process can run only one at a time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from slipway.errors import ServiceError
from slipway.rpc.values import failure_of_status
from slipway_coordinator import coordinator as coordinator_module
from slipway_coordinator.workflow import engine, workflow
from support.coordinators.harness import Harness, state, states, tiny_export, tiny_task, wait_for


def test_a_stage_nobody_runs_fails_the_task(tmp_path: Path) -> None:
    with Harness(tmp_path, options={"no_worker_seconds": 0.3}) as harness:
        tasks = (tiny_task("m", stage="nobody"), tiny_task("good"))
        export = harness.finished(harness.submit(tiny_export("x", *tasks, base=harness.base())))
        assert states(export) == {"m": "failed", "good": "succeeded"}
        assert failure_of_status(export.error).reason == "NO_WORKER"


def test_a_failed_attempt_leaves_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "slipway.coordinator"),
        Harness(tmp_path, options={"no_worker_seconds": 0.3}) as harness,
    ):
        name = harness.submit(tiny_export("x", tiny_task("m", stage="nobody"), base=harness.base()))
        harness.finished(name)
    lines = [line.getMessage() for line in caplog.records if " failed with " in line.getMessage()]
    assert lines == [f"{name}: attempt 1 of m (nobody) failed with NO_WORKER: nothing else is tried"]


def test_a_coordinator_that_stops_goes_on_later(tmp_path: Path) -> None:
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    tasks = (
        tiny_task("m", runs=str(runs)),
        tiny_task("slow", needs=("m",), sleep_seconds=60, unless=str(gate), runs=str(runs)),
    )
    with Harness(tmp_path) as harness:
        name = harness.submit(tiny_export("x", *tasks, base=harness.base()))
        wait_for(lambda: runs.exists() and "slow" in runs.read_text())
        last = next(harness.client.watch_export(name)).sequence
        began = time.monotonic()
    assert time.monotonic() - began < 50  # not 60
    gate.touch()
    with Harness(tmp_path) as harness:
        events = list(harness.client.watch_export(name, after_sequence=last))
        export = harness.client.get_export(name)
    assert events[0].sequence > last
    assert state(export) == "succeeded"
    assert runs.read_text().split() == ["m", "slow", "slow"]
    assert len(export.tasks[1].attempts) == 1


def test_an_export_whose_workflow_begins_while_the_coordinator_stops_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[asyncio.Task[object] | None] = []
    surroundings = workflow._surroundings

    def noting() -> workflow.Surroundings:
        begun.append(asyncio.current_task())
        return surroundings()

    # Nothing outside shows that the engine is done with a workflow whose end it does not store, so its task is noted.
    monkeypatch.setattr(workflow, "_surroundings", noting)
    with Harness(tmp_path) as harness:

        async def stopping() -> None:
            workflow.install_surroundings(None)  # the first step of the stop; the workflow begins before the next one

        record = tiny_export("x", tiny_task("m"), base=harness.base())
        harness.run(stopping)
        name = harness.submit(record)
        coordinator = harness.server.coordinator
        wait_for(lambda: harness.run(lambda: coordinator.call(lambda: engine.stored_workflow(record))))
        wait_for(lambda: bool(begun) and begun[0] is not None and begun[0].done())
    with Harness(tmp_path) as harness:
        assert state(harness.finished(name)) == "succeeded"


def test_a_fault_of_the_coordinator_ends_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    # No input reaches this path, so the fault itself has to be put there.
    monkeypatch.setattr(coordinator_module, "offer_of", broken)
    with Harness(tmp_path) as harness:
        export = harness.finished(harness.submit(tiny_export("x", tiny_task("m"), base=harness.base())))
    assert state(export) == "failed"
    assert failure_of_status(export.error).reason == "INTERNAL"
    assert "a bug" in export.error.message


def test_a_process_runs_one_coordinator(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Harness(tmp_path), pytest.raises(ServiceError, match="already") as caught, Harness(tmp_path / "other"):
        pass
    assert caught.value.reason == "COORDINATOR_LOCKED"


def test_a_state_has_one_coordinator(tmp_path: Path) -> None:
    with Harness(tmp_path), pytest.raises(ServiceError, match="active on") as caught, Harness(tmp_path):
        pass
    assert caught.value.reason == "COORDINATOR_LOCKED"
