"""A divided task at a coordinator: its parts run on several workers, and only what is lost of them is made again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.configuration import parse
from slipway.execution.runner import TaskRunner
from slipway.formats.tasks import PlannedTask
from slipway.planning.division import divide
from slipway.stage_call import StageCall
from slipway_coordinator.lifecycle.records import TaskRecord
from support.coordinators.harness import Harness, state, states, tiny_export, wait_for
from support.coordinators.joined_workers import joined

DIVIDED = "support.stages.divided:STAGE"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path, stages=(DIVIDED,)) as running:
        yield running


def parts(home: Path, **params: Any) -> tuple[TaskRecord, ...]:
    """The tasks of a work that is divided into three parts."""
    whole = PlannedTask(
        "work", DIVIDED, {"runs": str(home / "runs"), **params}, {"base": "source:base"}, "out", output="out"
    )
    return tuple(map(TaskRecord.from_plan, divide([whole], split_bytes=10, weight_bytes=30)))


def submit(harness: Harness, **params: Any) -> str:
    tasks = parts(harness.home, **params)
    return harness.submit(tiny_export("e", *tasks, base=harness.base(), recovery={"max_attempts": 3}))


def runs(harness: Harness) -> list[int]:
    """The parts that ran, in order; 0 is the join."""
    return sorted(int(line) for line in (harness.home / "runs").read_text().split())


def undivided(harness: Harness) -> str:
    """The digest of what the work makes in one piece."""
    runner = TaskRunner(harness.store, harness.home / "other")
    return asyncio.run(runner.run(StageCall(DIVIDED, {}, {"base": harness.base()}))).outputs["out"]


def test_the_coordinator_divides_by_the_size_of_the_base_in_its_store(harness: Harness) -> None:
    (harness.home / "weights").write_bytes(bytes(3 << 20))
    base = harness.store.put_files({"model.safetensors": harness.home / "weights"})
    settings = {"checkpoint": {"path": "run"}, "execution": {"split_bytes": 1 << 20, "shard_bytes": 1 << 20}}

    def merges(digest: str) -> list[str]:
        sources = {"base": digest, "adapter": harness.base("adapter")}
        planned = harness.client.create_export(parse(settings), sources=sources, validate_only=True)
        return [task.id for task in planned.tasks if task.stage == "merge"]

    assert merges(base) == ["merge.part-1", "merge.part-2", "merge.part-3", "merge"]
    assert merges("sha256:" + "9" * 64) == ["merge"], "nothing is known of a base that is not there"


def test_a_part_that_dies_is_made_again_alone(harness: Harness) -> None:
    export = harness.finished(submit(harness, dies=2))
    assert states(export) == dict.fromkeys(["work.part-1", "work.part-2", "work.part-3", "work"], "succeeded")
    assert runs(harness) == [0, 1, 2, 2, 3]
    second = export.tasks[1]
    assert [attempt.rule for attempt in second.attempts] == ["", "killed-again"]
    assert dict(export.outputs) == {"out": undivided(harness)}


@pytest.mark.slow
def test_two_workers_make_parts_side_by_side(tmp_path: Path) -> None:
    with (
        Harness(tmp_path, with_worker=False) as harness,
        joined(harness, "one", stages=(DIVIDED,)),
        joined(harness, "two", stages=(DIVIDED,)),
    ):
        export = harness.finished(submit(harness, together=True))
        assert state(export) == "succeeded"
        assert len({task.attempts[-1].worker for task in export.tasks}) == 2
        assert dict(export.outputs) == {"out": undivided(harness)}


def test_cancelling_ends_running_and_waiting_parts(harness: Harness) -> None:
    name = submit(harness, holds=True)
    wait_for(lambda: (harness.home / "runs").exists() and len(runs(harness)) == 2)
    harness.client.cancel_export(name)
    export = harness.finished(name)
    assert state(export) == "cancelled"
    assert set(states(export).values()) == {"cancelled"}


@pytest.mark.slow
def test_a_retry_makes_the_failed_part_and_the_join(harness: Harness) -> None:
    fails = harness.home / "runs.fails"
    fails.touch()
    name = submit(harness, fails=3)
    export = harness.finished(name)
    assert state(export) == "failed"
    assert states(export)["work"] == "skipped"
    fails.unlink()
    harness.client.retry_export(name)
    assert state(harness.finished(name)) == "succeeded"
    assert runs(harness) == [0, 1, 2, 3, 3]


@pytest.mark.slow
def test_parts_that_differ_are_replaced_by_the_whole_work(harness: Harness) -> None:
    name = submit(harness, differ=True)
    export = harness.finished(name)
    assert state(export) == "succeeded"
    assert runs(harness) == [-1, 0, 1, 2, 3]
    work = export.tasks[-1]
    assert [attempt.rule for attempt in work.attempts] == ["", "parts-in-one-piece"]
    assert dict(work.inputs) == {"base": "source:base"}
    assert "parts" not in work.attempts[-1].params
    assert dict(export.outputs) == {"out": undivided(harness)}


@pytest.mark.slow
def test_a_part_that_the_store_lost_is_made_again_before_the_join(harness: Harness) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lost = _lose_before_join(harness, patch)
        export = harness.finished(submit(harness))
    assert lost, "the blob was removed"
    assert state(export) == "succeeded"
    assert [task.attempts[-1].rule for task in export.tasks] == ["", "inputs-again", "", "inputs-again"]
    assert runs(harness) in ([0, 0, 1, 2, 2, 3], [0, 1, 2, 2, 3])
    assert dict(export.outputs) == {"out": undivided(harness)}


def _lose_before_join(harness: Harness, patch: pytest.MonkeyPatch) -> list[str]:
    """Remove a file of the second part from the store, as a disk might, when the join begins."""
    from slipway.artifacts.digests import digest_bytes

    lost: list[str] = []
    run = TaskRunner.run

    async def run_without(self: TaskRunner, call: StageCall, **more: Any) -> Any:
        if call.params.get("parts") and not call.params.get("part") and not lost:
            digest = digest_bytes(b"weights 1")
            harness.store.blob_path(digest).unlink()
            lost.append(digest)
        return await run(self, call, **more)

    patch.setattr(TaskRunner, "run", run_without)  # the moment between two tasks has no other handle
    return lost
