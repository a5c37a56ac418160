"""Which workers a task is for: what the plan asks, who gets it, and what is said when nobody can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipway.configuration import parse
from slipway.errors import StageError
from slipway.planning.plan import plan
from slipway.requirements import Abilities, Needs, Requirements
from slipway.rpc.values import failure_of_status
from slipway.stage_call import StageCall
from slipway_coordinator.broker.waiting import Waiting
from slipway_coordinator.lifecycle.offers import Offer, offer_of, requirements_of
from slipway_coordinator.lifecycle.records import AttemptRecord, ExportRecord, TaskRecord, TaskState
from slipway_coordinator.workflow.periodic import Unserved
from slipway_protos.v1 import export_pb2, worker_pb2, worker_pb2_grpc
from slipway_tensorrt_build.format import builders
from support.coordinators.harness import STAGE, Harness, states, tiny_export, tiny_task, wait_for

GIB = 1 << 30
ADA = Abilities(frozenset({"x"}), "sm89", 48 * GIB, 64 * GIB, {"tensorrt": "10.13", "tensorrt-rtx": "1.1"})
HOPPER = replace(ADA, gpu_architecture="sm90")
PLAIN = replace(ADA, gpu_architecture="", gpu_memory_bytes=0)
BARE = Abilities(frozenset({"x"}))


@pytest.mark.parametrize(
    ("builder", "targets", "who"),
    [
        ("tensorrt", (), {"ada", "hopper"}),
        ("tensorrt_rtx", (), {"ada", "hopper"}),
        ("tensorrt_rtx", ("sm89",), {"ada", "hopper", "plain"}),
        ("auto", (), {"ada", "hopper"}),
        ("auto", ("sm89",), {"ada", "hopper", "plain"}),
        ("auto", ("sm89", "sm120"), {"ada", "hopper", "plain"}),
    ],
)
def test_builders_find_their_workers(builder: str, targets: tuple[str, ...], who: set[str]) -> None:
    requirements = Requirements(any_of=builders(builder, targets))
    workers = {"ada": ADA, "hopper": HOPPER, "plain": PLAIN, "bare": BARE}
    assert {name for name, worker in workers.items() if requirements.met_by(worker)} == who


def test_tensorrt_alone_builds_for_the_gpu_that_is_there() -> None:
    requirements = Requirements(any_of=builders("auto", ("sm89",)))
    only = {"tensorrt": "10.13"}
    assert requirements.met_by(replace(ADA, libraries=only))
    assert not requirements.met_by(replace(HOPPER, libraries=only))
    assert not requirements.met_by(replace(PLAIN, libraries=only))
    assert not Requirements(any_of=builders("auto", ("sm89", "sm90"))).met_by(replace(ADA, libraries=only))


@pytest.mark.parametrize(
    ("needs", "worker", "met"),
    [
        (Needs(memory_bytes=64 * GIB), ADA, True),
        (Needs(memory_bytes=64 * GIB + 1), ADA, False),
        (Needs(gpu_memory_bytes=48 * GIB), ADA, True),
        (Needs(gpu_memory_bytes=1), PLAIN, False),
        (Needs(libraries=("tensorrt", "torch")), ADA, False),
        (Needs(), BARE, True),
    ],
    ids=["memory", "too little memory", "gpu memory", "no gpu", "no library", "nothing"],
)
def test_needs(needs: Needs, worker: Abilities, met: bool) -> None:
    assert needs.met_by(worker) is met


def offer(requirements: Requirements, **more: Any) -> Offer:
    return Offer("projects/p/exports/e", "t", 1, StageCall("x", {}, {}), requirements=requirements, **more)


def takers(offered: Offer, **known: Abilities) -> set[str]:
    """Who of these would be given the offer."""
    waiting = Waiting()
    waiting.add(offered)
    return {name for name in known if waiting.first(name, known, projects=waiting.projects) is not None}


def test_what_is_preferred_is_waited_for_as_long_as_there_is_one() -> None:
    offered = offer(Requirements(prefers=(Needs(gpu_architectures=("sm89",)),)))
    assert takers(offered, ada=ADA, hopper=HOPPER, plain=PLAIN) == {"ada"}
    assert takers(offered, hopper=HOPPER, plain=PLAIN) == {"hopper", "plain"}


def test_preferences_count_in_their_order() -> None:
    large = replace(PLAIN, memory_bytes=512 * GIB)
    offered = offer(Requirements(prefers=(Needs(gpu=True), Needs(memory_bytes=256 * GIB))))
    assert takers(offered, ada=ADA, large=large) == {"ada"}
    assert takers(offered, plain=PLAIN, large=large) == {"large"}
    assert takers(offered, ada=ADA, both=replace(ADA, memory_bytes=512 * GIB)) == {"both"}


def test_others_than_those_it_failed_on_are_others_that_can() -> None:
    offered = offer(Requirements(any_of=(Needs(gpu=True),)), avoid=("ada",))
    assert takers(offered, ada=ADA, plain=PLAIN) == {"ada"}
    assert takers(offered, ada=ADA, hopper=HOPPER) == {"hopper"}


def test_what_nobody_can_take_holds_nobody_up() -> None:
    waiting = Waiting()
    waiting.add(offer(Requirements(any_of=(Needs(gpu_architectures=("sm120",)),)), priority=9))
    waiting.add(replace(offer(Requirements()), task="u"))
    first = waiting.first("plain", {"plain": PLAIN}, projects=waiting.projects)
    assert first is not None
    assert first.task == "u"


def test_a_worker_of_another_version_is_given_what_it_knows() -> None:
    """One that says nothing of it takes whatever it is given, as the stage itself says best what is wrong."""
    offered = replace(offer(Requirements()), call=StageCall("x", {"level": "int8", "calibrated": True}, {}))
    older = replace(BARE, parameters={"x": frozenset({"level"})})
    newer = replace(BARE, parameters={"x": frozenset({"level", "calibrated", "more"})})
    assert takers(offered, older=older) == set()
    assert takers(offered, older=older, newer=newer, silent=BARE) == {"newer", "silent"}
    assert takers(replace(offered, checked=False), older=older) == {"older"}
    avoiding = replace(offered, avoid=("newer",))
    assert takers(avoiding, older=older, newer=newer) == {"newer"}
    assert "they do not know calibrated" in offered.placement.lacking([older, older])
    assert "another version" in offered.placement.lacking([older])
    assert "take no new tasks" in offered.placement.lacking([older, newer])


def test_a_task_waits_for_a_worker_that_knows_its_parameters(tmp_path: Path) -> None:
    """During an upgrade: the coordinator plans with a parameter that the worker there does not know yet."""
    with (
        Harness(tmp_path, options={"workers_gone": False}) as harness,
        grpc.insecure_channel(harness.address) as channel,
    ):
        task = tiny_task("m", calibrated=True)
        name = harness.submit(tiny_export("skew", task, base=harness.base()))
        (waiting,) = wait_for(lambda: list(harness.server.coordinator.broker.board.waiting.values()))
        time.sleep(1)
        assert states(harness.client.get_export(name)) == {"m": "queued"}
        assert "do not know calibrated" in harness.server.coordinator.broker.board.lacking(waiting)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        known = worker_pb2.StageParameters(names=sorted(task.params))
        newer = worker_pb2.SynchronizeRequest(
            worker_id="newer", stages=[STAGE], free_slots=1, parameters={STAGE: known}
        )
        (lease,) = stub.Synchronize(newer).leases
        assert lease.task == f"{name}:m:1"


def planned(**settings: Any) -> ExportRecord:
    configuration = parse(settings)
    tasks = plan(configuration, {"base", "adapter"})
    record = tiny_export("planned", **settings)
    return record.with_(tasks=tuple(TaskRecord.from_plan(task) for task in tasks))


TENSORRT = {"formats": {"tensorrt": {"enabled": True, "builder": "tensorrt"}}}


def done(record: ExportRecord, task_id: str, **facts: Any) -> ExportRecord:
    return record.with_task(record.task(task_id).with_(state=TaskState.SUCCEEDED, facts=facts))


def test_requirements_follow_from_what_was_found_out() -> None:
    record = planned(**TENSORRT)
    before = requirements_of(record, record.task("validate"))
    assert before.prefers == (Needs(gpu=True),)
    record = done(record, "merge", output_bytes=8 * GIB)
    record = done(record, "tensorrt_build", targets=["sm89"])
    found = requirements_of(record, record.task("validate"))
    assert found.prefers == (Needs(gpu=True, gpu_architectures=("sm89",)), Needs(memory_bytes=16 * GIB))
    build = requirements_of(record, record.task("tensorrt_build"))
    assert build == Requirements(any_of=builders("tensorrt", ()), prefers=(Needs(gpu_memory_bytes=8 * GIB),))
    assert requirements_of(record, record.task("merge")) == Requirements()
    stored = ExportRecord.from_json(record.to_json())
    assert [requirements_of(stored, task) for task in stored.tasks] == [
        requirements_of(record, t) for t in record.tasks
    ]


def test_after_a_shortage_of_memory_more_is_preferred() -> None:
    record = planned(resources={"stage_timeouts": {"merge": 60}})
    failure = StageError("x", reason="OUT_OF_MEMORY").failure()
    failed = AttemptRecord(number=1, state=TaskState.FAILED, params={}, failure=failure, peak_memory_bytes=4 * GIB)
    again = AttemptRecord(number=2, state=TaskState.QUEUED, params={})
    task = record.task("merge").with_(attempts=(failed, again))
    offered = offer_of(record, task)
    assert offered.requirements == Requirements(prefers=(Needs(memory_bytes=6 * GIB),))
    assert offered.call.limits.timeout_seconds == 60
    other = record.task("validate").with_(attempts=(again.with_(number=1),))
    assert offer_of(record, other).call.limits.timeout_seconds != 60, "that of another stage"
    assert offer_of(record, task, alone=True).requirements == Requirements()
    other_run = task.with_(attempts=(failed, again.with_(run=2)))
    assert offer_of(record.with_(run=2), other_run).requirements == Requirements()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, with_worker=False, options={"workers_gone": False}) as running:
        yield running


@pytest.fixture
def worker(harness: Harness) -> Iterator[Callable[..., list[str]]]:
    """Calls of a worker by name, with what it has; gives the tasks it is given."""
    with grpc.insecure_channel(harness.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)

        def synchronize(name: str, *, draining: bool = False, **has: Any) -> list[str]:
            request = worker_pb2.SynchronizeRequest(worker_id=name, stages=["x"], free_slots=4, draining=draining)
            request.capabilities.MergeFrom(worker_pb2.Capabilities(**has))
            return [lease.task.split(":")[1] for lease in stub.Synchronize(request).leases]

        yield synchronize


def needing(name: str, *needs: Needs) -> TaskRecord:
    return tiny_task(name, stage="x").with_(requirements=Requirements(any_of=needs))


def test_workers_get_only_what_they_can_run(harness: Harness, worker: Callable[..., list[str]]) -> None:
    tasks = (
        needing("ada", Needs(gpu_architectures=("sm89",))),
        needing("large", Needs(memory_bytes=64 * GIB)),
        needing("gpu-large", Needs(gpu_memory_bytes=40 * GIB)),
        needing("library", Needs(libraries=("tensorrt",))),
        needing("any"),
    )
    harness.submit(tiny_export("matching", *tasks))
    wait_for(lambda: len(harness.server.coordinator.broker.board.load().waiting) == 5)
    assert worker("bare") == ["any"]
    assert worker("hopper", gpu_architecture="sm90", gpu_memory_bytes=80 * GIB) == ["gpu-large"]
    assert worker("library", versions={"tensorrt": "10.13"}) == ["library"]
    assert worker("large", memory_bytes=65 * GIB) == ["large"]
    assert worker("ada", gpu_architecture="sm89") == ["ada"]


def test_what_nobody_can_run_is_said_to_those_who_watch(harness: Harness, worker: Callable[..., list[str]]) -> None:
    coordinator = harness.server.coordinator
    name = harness.submit(tiny_export("watched", needing("build", Needs(gpu_architectures=("sm89",)))))
    wait_for(lambda: coordinator.broker.board.load().waiting)
    assert worker("hopper", gpu_architecture="sm90") == []
    # The coordinator's own waits for a minute; this one has the same broker and hub.
    looking = Unserved(coordinator.broker.board, coordinator.hub, coordinator._notify, fail_after=None, say_after=0.1)
    time.sleep(0.2)
    harness.run(looking.check)
    harness.run(looking.check)
    harness.client.cancel_export(name)
    lines = [event.log for event in harness.client.watch_export(name) if event.WhichOneof("event") == "log"]
    assert [(line.task, line.level, line.message) for line in lines] == [
        ("build", "warning", "build waits: x needs a GPU of sm89; its workers (1) have sm90")
    ]


def test_a_queue_that_nobody_can_run_fills_no_log(
    harness: Harness,
    worker: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("slipway_coordinator.workflow.periodic._MOST_LINES", 2)
    coordinator, needs = harness.server.coordinator, Needs(gpu_architectures=("sm89",))
    name = harness.submit(tiny_export("queue", *(needing(f"build{number}", needs) for number in range(5))))
    wait_for(lambda: len(coordinator.broker.board.load().waiting) == 5)
    assert worker("hopper", gpu_architecture="sm90") == []
    looking = Unserved(coordinator.broker.board, coordinator.hub, coordinator._notify, fail_after=None, say_after=0.1)
    time.sleep(0.2)
    with caplog.at_level(logging.WARNING, "slipway.coordinator"):
        harness.run(looking.check)
        harness.run(looking.check)
    said = [record.message for record in caplog.records if record.name == "slipway.coordinator"]
    assert [message.partition(" waits: ")[0].rpartition(" ")[2] for message in said[:2]] == ["build0", "build1"]
    assert said[2:] == ["3 more tasks waiting: watchers of their exports are told why"]
    harness.client.cancel_export(name)
    lines = [event.log for event in harness.client.watch_export(name) if event.WhichOneof("event") == "log"]
    assert {line.task for line in lines} == {f"build{number}" for number in range(5)}, "each export's watchers are told"


def test_workers_that_take_nothing_now_get_nothing_and_nobody_waits_for_them(
    harness: Harness, worker: Callable[..., list[str]]
) -> None:
    board = harness.server.coordinator.broker.board
    gpu = Needs(gpu=True)
    harness.submit(tiny_export("resting", tiny_task("a", stage="x").with_(requirements=Requirements(prefers=(gpu,)))))
    wait_for(lambda: board.load().waiting)
    assert worker("full", draining=True, gpu_architecture="sm89") == []
    (offer,) = board.unserved_offers(longer_than=0.0, now_ready=True)
    assert board.lacking(offer).startswith("the workers that can run x (1) take no new tasks")
    assert board.unserved_offers(longer_than=0.0) == []
    assert worker("other") == ["a"]


def test_what_nobody_can_run_fails_where_nobody_will_come(tmp_path: Path) -> None:
    options = {"workers_gone": False, "no_worker_seconds": 0.3}
    with Harness(tmp_path, stages=(STAGE, "merge"), options=options) as harness:
        needs = (Needs(gpu=True, libraries=("tensorrt",)), Needs(memory_bytes=1 << 50))
        # The worker says which libraries its stages find: that of merge, though not of this one, is here.
        good = tiny_task("good").with_(requirements=Requirements(any_of=(Needs(libraries=("transformers",)),)))
        record = tiny_export("x", good, base=harness.base())
        impossible = tiny_task("build").with_(requirements=Requirements(any_of=needs))
        export = harness.finished(harness.submit(record.with_(tasks=(*record.tasks, impossible))))
    assert states(export) == {"good": "succeeded", "build": "failed"}
    failure = failure_of_status(export.error)
    assert failure.reason == "NO_WORKER"
    assert "needs a GPU and tensorrt or 1125.9 TB of memory for a task" in failure.message
    assert "have no GPU" in failure.message
    assert "no tensorrt" in failure.message


def test_a_warning_of_a_stage_reaches_those_who_watch(tmp_path: Path) -> None:
    stage, said, events = "support.stages.plain:TROUBLE", tmp_path / "said", []
    with Harness(tmp_path, stages=(stage,)) as harness:
        params = {"kind": "much-memory", "until": str(said)}
        task = TaskRecord(id="much", stage=stage, params=params, inputs={})
        settings = {"resources": {"max_memory_bytes": 120 << 20}, "recovery": {"max_attempts": 1}}
        name = harness.submit(tiny_export("much", task, **settings))
        for event in harness.client.watch_export(name):
            events.append(event)
            if "of the 125.8 MB it should stay below" in event.log.message:
                assert event.log.level == "warning"
                said.touch()
    assert said.exists()
    (attempt,) = events[-1].export.tasks[0].attempts
    assert attempt.state == export_pb2.TASK_STATE_SUCCEEDED
    assert attempt.peak_memory_bytes > 120 << 20
