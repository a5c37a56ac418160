"""An engine's side of the broker: every attempt has one worker of its own, and what the engine loses is known at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from slipway.artifacts.manifest import Manifest
from slipway.contracts.engine import Submission, SubmissionEnd, SubmissionReport, WorkerStart
from slipway.division import MOST_PARTS, PART, PARTS, part_id
from slipway.errors import StageError
from slipway.formats.tasks import PlannedTask
from slipway.planning.division import divide
from slipway.planning.references import AttemptKey
from slipway.rpc.values import failure_of_status
from slipway.stage_call import StageCall
from slipway_coordinator.broker import submitter as submitter_module
from slipway_coordinator.broker.board import Board
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.broker.submitter import EngineSetup, Submitter, submission_id
from slipway_coordinator.lifecycle.offers import Offer, WorkerReport
from slipway_coordinator.lifecycle.records import TaskRecord
from slipway_coordinator.storage.events import Hub
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import Harness, state, states, tiny_export, tiny_task, wait_for
from support.coordinators.process_engine import ProcessEngine


@contextmanager
def place(home: Path, *, cancels_at_stop: bool = True, **options: object) -> Iterator[tuple[Harness, ProcessEngine]]:
    """Run a coordinator whose tasks run as processes."""
    engines: list[ProcessEngine] = []

    def setup(_: int) -> EngineSetup:
        engines.append(ProcessEngine(home / "workers", WorkerStart("me", f"unix:{home / 's'}", str(home / "store"))))
        return EngineSetup("processes", engines[0], "me", cancels_at_stop=cancels_at_stop)

    harness = Harness(home, with_worker=False, options={"workers_gone": False, **options}, engine=setup)
    with harness:
        yield harness, engines[0]


def started(engine: ProcessEngine, number: int = 1) -> Submission:
    """Wait for a submission."""
    return wait_for(lambda: len(engine.submitted) >= number and engine.submitted[number - 1])


def running(harness: Harness, name: str) -> bool:
    return states(harness.client.get_export(name))["m"] == "running"


def attempt(harness: Harness, name: str) -> export_pb2.Attempt:
    return harness.client.get_export(name).tasks[0].attempts[-1]


def test_each_attempt_has_a_worker_of_its_own_near_its_inputs(tmp_path: Path) -> None:
    with place(tmp_path) as (harness, engine):
        tasks = (tiny_task("m"), tiny_task("q", needs=("m",)))
        name = harness.submit(tiny_export("x", *tasks, base=harness.base()).with_(priority=3))
        export = harness.finished(name)
        assert state(export) == "succeeded"
        first, second = engine.submitted
        assert (first.attempt, first.stage, first.project) == (f"{name}:m:1", tasks[0].stage, "default")
        assert (first.priority, first.near, second.near) == (3, (), ("here",))
        (digest,) = second.inputs
        assert digest == export.tasks[0].outputs["out"]
        assert second.inputs[digest] == len("m(base)")
        assert second.disk_bytes == 2 * len("m(base)")
        workers = {task.attempts[0].worker for task in export.tasks}
        assert len(workers) == 2
        assert engine.cancelled == []
        wait_for(lambda: not harness.server.coordinator.broker.board.workers)  # all have said that they end


def test_a_worker_that_pulls_gets_nothing_beside_an_engine(tmp_path: Path) -> None:
    with place(tmp_path) as (harness, engine):
        engine.hold = True
        name = harness.submit(tiny_export("x", tiny_task("m"), base=harness.base()))
        started(engine)
        board = harness.server.coordinator.broker.board
        pulling = WorkerReport("w", frozenset({engine.submitted[0].stage}), slots=1, free_slots=1)
        assert harness.run(lambda: harness.server.coordinator.broker.synchronize(pulling)).granted == ()
        assert AttemptKey.parse(f"{name}:m:1") in board.waiting
        (group,) = harness.client.list_workers().queue
        assert "processes has not started its worker" in group.detail


@pytest.mark.parametrize(
    ("end", "losses", "reason"),
    [
        (SubmissionEnd.NODE_LOST, 1, ""),
        pytest.param(SubmissionEnd.PREEMPTED, 0, "", marks=pytest.mark.slow),
        pytest.param(SubmissionEnd.OUT_OF_MEMORY, 0, "OUT_OF_MEMORY", marks=pytest.mark.slow),
    ],
)
def test_a_lost_worker_is_known_at_once(tmp_path: Path, end: SubmissionEnd, losses: int, reason: str) -> None:
    free = tmp_path / "free"
    with place(tmp_path, lease_seconds=600) as (harness, engine):
        task = tiny_task("m", sleep_seconds=60, unless=str(free))
        name = harness.submit(tiny_export("x", task, base=harness.base()))
        wait_for(lambda: running(harness, name))
        engine.lose(started(engine).id, end)
        again = started(engine, 2)  # long before the lease would have ended
        free.touch()
        export = harness.finished(name)
        assert state(export) == "succeeded"
        (first, *others) = export.tasks[0].attempts
        if reason:
            assert failure_of_status(first.error).reason == reason
            assert (len(others), again.attempt) == (1, f"{name}:m:2")
        else:
            assert (others, again.attempt) == ([], f"{name}:m:1")
            assert again.id != engine.submitted[0].id
        record = harness.run(lambda: harness.server.coordinator.load(name))
        assert record.tasks[0].attempts[-1].losses == losses


@pytest.mark.slow
def test_a_worker_that_is_silent_but_not_gone_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process ends neither at the engine's signal nor at the coordinator's word."""
    monkeypatch.setattr(submitter_module, "_EXIT_SECONDS", 0.5)
    monkeypatch.setattr(submitter_module, "_LOST_SECONDS", 1.5)
    free = tmp_path / "free"
    with place(tmp_path, lease_seconds=2) as (harness, engine):
        name = harness.submit(tiny_export("x", tiny_task("m", sleep_seconds=60, unless=str(free)), base=harness.base()))
        wait_for(lambda: running(harness, name))
        first = started(engine)
        _, pid = json.loads((tmp_path / "workers" / f"{first.id}.json").read_text())
        os.killpg(pid, signal.SIGSTOP)
        try:
            again = started(engine, 2)
            assert (again.attempt, engine.cancelled) == (f"{name}:m:1", [first.id])
            free.touch()
            assert state(harness.finished(name)) == "succeeded"
        finally:
            os.killpg(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_worker_that_returned_its_task_was_not_one_that_never_started(tmp_path: Path) -> None:
    free = tmp_path / "free"
    with place(tmp_path) as (harness, engine):
        name = harness.submit(tiny_export("x", tiny_task("m", sleep_seconds=60, unless=str(free)), base=harness.base()))
        for number in (1, 2, 3):
            submission = started(engine, number)
            wait_for(lambda: running(harness, name))
            _, pid = json.loads((tmp_path / "workers" / f"{submission.id}.json").read_text())
            os.killpg(pid, signal.SIGTERM)
        started(engine, 4)
        free.touch()
        assert state(harness.finished(name)) == "succeeded"


def test_the_end_of_one_submission_ends_no_lease_of_another(tmp_path: Path) -> None:
    free = tmp_path / "free"
    with place(tmp_path) as (harness, engine):
        name = harness.submit(tiny_export("x", tiny_task("m", sleep_seconds=60, unless=str(free)), base=harness.base()))
        wait_for(lambda: running(harness, name))
        broker, key = harness.server.coordinator.broker, AttemptKey.parse(f"{name}:m:1")
        other = f"{started(engine).id}2"
        failure = StageError("lost", reason="OUT_OF_MEMORY").failure()
        assert not harness.run(lambda: broker.end_lost(key, other, departed=False, why="was lost"))
        harness.run(lambda: broker.fail(key, other, failure))
        assert key in broker.board.held
        free.touch()
        export = harness.finished(name)
        assert (state(export), len(engine.submitted)) == ("succeeded", 1)


def test_of_two_submissions_of_an_attempt_the_last_one_is_adopted(tmp_path: Path) -> None:
    key = AttemptKey.parse("projects/p/exports/x:m:1")
    engine = ProcessEngine(tmp_path / "workers", WorkerStart("me", "unix:s", str(tmp_path)))
    ids = [f"slipway-m-0-{number}" for number in (1, 2)]
    setup, broker, hub = EngineSetup("processes", engine, "me"), cast("Broker", Known()), cast("Hub", None)

    async def adopted(reports: list[SubmissionReport]) -> list[str]:
        async def adopt() -> list[SubmissionReport]:
            return reports

        async def cancel(name: str) -> None:
            engine.cancelled.append(name)

        engine.adopt, engine.cancel, engine.cancelled = adopt, cancel, []  # type: ignore[method-assign]
        await Submitter(broker, setup, hub, lambda _: Manifest(()), frozenset()).start()
        return engine.cancelled

    one, two = (SubmissionReport(name, str(key), "here") for name in ids)
    foreign = SubmissionReport("somebody's", "no attempt", "here")
    for order in ([one, two], [two, foreign, one]):
        assert asyncio.run(adopted(order)) == [ids[0]]


class Known:
    """What a submitter asks of its broker before it begins."""

    def __init__(self) -> None:
        self.board = Board(30.0, time.monotonic)


def test_what_no_node_can_run_fails_and_says_why(tmp_path: Path) -> None:
    with place(tmp_path) as (harness, engine):
        engine.hold = True
        name = harness.submit(tiny_export("x", tiny_task("m"), base=harness.base()))
        submission = started(engine)
        harness.run(lambda: _call(lambda: engine.lose(submission.id, SubmissionEnd.UNSCHEDULABLE)))
        export = harness.finished(name)
        failure = failure_of_status(export.error)
        assert (state(export), failure.reason) == ("failed", "WORKER_UNFIT")
        assert "no node of processes" in failure.message


async def _call(function: object) -> None:
    function()  # type: ignore[operator]


def test_workers_that_do_not_start_fail_the_attempt_after_a_few(tmp_path: Path) -> None:
    with place(tmp_path) as (harness, engine):
        engine.broken = True
        name = harness.submit(tiny_export("x", tiny_task("m"), base=harness.base()))
        export = harness.finished(name)
        failure = failure_of_status(export.tasks[0].attempts[0].error)
        assert (failure.reason, "3 workers" in failure.message) == ("ENGINE_FAILED", True)
        assert state(export) == "failed"


def test_cancelling_ends_the_worker_within_seconds(tmp_path: Path) -> None:
    with place(tmp_path) as (harness, engine):
        name = harness.submit(tiny_export("x", tiny_task("m", sleep_seconds=60), base=harness.base()))
        wait_for(lambda: running(harness, name))
        began = time.monotonic()
        harness.client.cancel_export(name)
        assert state(harness.finished(name)) == "cancelled"
        assert time.monotonic() - began < 20  # 5 s on an idle machine
        assert engine.cancelled == [engine.submitted[0].id]
        wait_for(lambda: not list((tmp_path / "workers").glob("*.json")))


@pytest.mark.slow
def test_a_restarted_coordinator_adopts_what_runs_and_cancels_what_is_not_wanted(tmp_path: Path) -> None:
    free = tmp_path / "free"
    with place(tmp_path, cancels_at_stop=False) as (harness, engine):
        for export in ("x", "gone"):
            task = tiny_task("m", sleep_seconds=60, unless=str(free), runs=str(tmp_path / f"runs-{export}"))
            name = harness.submit(tiny_export(export, task, base=harness.base()))
            wait_for(lambda name=name: running(harness, name))
    worker = {one.attempt: one.id for one in engine.submitted}
    with place(tmp_path) as (harness, again):
        name, gone = (f"projects/default/exports/{export}" for export in ("x", "gone"))
        wait_for(lambda: AttemptKey.parse(f"{name}:m:1") in harness.server.coordinator.broker.board.held)
        harness.client.cancel_export(gone)
        assert state(harness.finished(gone)) == "cancelled"
        free.touch()
        assert state(harness.finished(name)) == "succeeded"
        assert again.submitted == []
        assert again.cancelled == [worker[f"{gone}:m:1"]]
    assert (tmp_path / "runs-x").read_text() == "m\n"


def test_few_submissions_wait_at_the_engine_and_projects_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitter_module, "MOST_WAITING", 4)
    with place(tmp_path) as (harness, engine):
        engine.hold = True
        base = harness.base()
        harness.submit(tiny_export("many", *(tiny_task(f"t{number}") for number in range(9)), base=base))
        started(engine, 4)
        other = tiny_export("one", tiny_task("mine"), base=base).with_(name="projects/other/exports/one")
        harness.submit(other)
        harness.client.cancel_export("projects/default/exports/many")
        wait_for(lambda: len(engine.submitted) == 5)
        assert [one.project for one in engine.submitted] == ["default"] * 4 + ["other"]


def test_a_worker_whose_version_does_not_know_parts_gets_none(tmp_path: Path) -> None:
    stage = "support.stages.divided:STAGE"
    whole = PlannedTask("work", stage, {"runs": str(tmp_path / "runs")}, {"base": "source:base"}, "out", output="out")
    tasks = tuple(map(TaskRecord.from_plan, divide([whole], split_bytes=1, weight_bytes=2)))
    earlier = {stage: frozenset({"runs", "dies"})}
    with place(tmp_path) as (harness, engine):
        engine.hold = True
        name = harness.submit(tiny_export("x", *tasks, base=harness.base()))
        broker, key = harness.server.coordinator.broker, AttemptKey.parse(f"{name}:work.part-1:1")
        for number in range(3):
            one = wait_for(lambda n=number: [each for each in engine.submitted if each.attempt == str(key)][n:])[0]
            report = WorkerReport(one.id, frozenset({stage}), slots=1, free_slots=1, only_task=key, parameters=earlier)
            answer = harness.run(lambda report=report: broker.synchronize(report))
            assert (answer.granted, answer.cancel) == ((), (key,)), "so it ends at once"
            engine.lose(one.id, SubmissionEnd.EXITED)
        failure = failure_of_status(
            wait_for(lambda: attempt(harness, name).error.message and attempt(harness, name).error)
        )
    assert failure.reason == "ENGINE_FAILED"
    assert "they do not know part, parts" in failure.message
    assert not (tmp_path / "runs").exists()


def test_ids_are_names_that_kubernetes_takes_too() -> None:
    long = "Quantize_int4.with.a.long.name.of.a.task"

    def of(owner: str = "me", *, number: int = 1, attempt: int = 2, trace: str = "00-1-2-01", part: int = 0) -> str:
        task, params = (part_id(long, part), {PART: part, PARTS: MOST_PARTS}) if part else (long, {})
        offer = Offer("projects/p/exports/x", task, attempt, StageCall("x", params, {}), traceparent=trace)
        return submission_id(owner, offer, number)

    first = of()
    assert first == of()
    assert first.replace("-", "").isalnum()
    assert first == first.lower()
    assert len(first) < 64
    later = of(trace="00-3-4-01")  # of an export that was made under the name of a deleted one
    assert len({first, later, of("you"), of(number=2), of(attempt=3)}) == 5
    assert of(part=12).startswith("slipway-quantize-int4-wi-part-12-"), "people see which part it is"
    assert len(of(part=MOST_PARTS, number=10**12)) < 64
