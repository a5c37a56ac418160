"""Why tasks wait, and what of it a caller may see; over a board that no worker has to join."""

from __future__ import annotations

import time

import pytest

from slipway.planning.references import AttemptKey
from slipway.registry import IMPORT
from slipway.requirements import Needs, Requirements
from slipway.stage_call import StageCall
from slipway_coordinator.broker.board import Board
from slipway_coordinator.broker.overview import MOST_GROUPS, Queue, Sight, WaitingGroup, WaitReason, seen_workers
from slipway_coordinator.lifecycle.offers import Offer, WorkerReport

ALL = Sight(everything=True, project=lambda _: True)
RED = Sight(everything=False, project=lambda project: project == "red")
STAGES = frozenset({"merge", "gguf"})


def offer(project: str = "red", task: str = "t", stage: str = "merge", **more: object) -> Offer:
    params = more.pop("params", {})
    return Offer(f"projects/{project}/exports/x", task, 1, StageCall(stage, params, {}), **more)  # type: ignore[arg-type]


@pytest.fixture
def board() -> Board:
    board = Board(ttl=10.0, clock=lambda: 100.0)
    board.record_report(WorkerReport("a", STAGES, memory_bytes=1000, parameters={"merge": frozenset({"known"})}))
    return board


def groups(board: Board, sight: Sight = ALL) -> list[WaitingGroup]:
    return Queue.of(board, now=time.time()).groups(sight)


@pytest.mark.parametrize(
    ("waiting", "reason", "detail"),
    [
        (offer(), WaitReason.NO_ROOM, "the workers that can run merge (1)"),
        (offer(stage="other"), WaitReason.NO_WORKER, "no worker runs the stage other"),
        (
            offer(requirements=Requirements(any_of=(Needs(gpu_architectures=("sm90",)),))),
            WaitReason.WORKER_UNFIT,
            "merge needs a GPU of sm90; its workers (1) have no GPU",
        ),
        (offer(requirements=Requirements(any_of=(Needs(memory_bytes=2000),))), WaitReason.WORKER_UNFIT, "memory"),
        (offer(params={"new": 1}), WaitReason.WORKER_OUTDATED, "they do not know new"),
        (offer(not_before=time.time() + 86_400), WaitReason.POSTPONED, "a little later"),
        (offer(not_before=time.time() + 86_400, avoid=("a",)), WaitReason.POSTPONED, "a little later"),
        (offer(not_before=time.time() + 86_400, avoid=("b",)), WaitReason.NO_ROOM, "no room"),
        (offer(stage="other", not_before=time.time() + 86_400), WaitReason.NO_WORKER, "other"),
    ],
)
def test_each_task_has_the_reason_why_it_waits(board: Board, waiting: Offer, reason: WaitReason, detail: str) -> None:
    board.offer(waiting)
    (group,) = groups(board)
    assert (group.stage, group.project, group.count, group.reason) == (waiting.stage, "red", 1, reason)
    assert detail in group.detail


def test_workers_that_take_no_tasks_are_the_reason(board: Board) -> None:
    board.record_report(WorkerReport("a", STAGES, draining=True))
    board.offer(offer())
    assert [group.reason for group in groups(board)] == [WaitReason.WORKERS_DRAINING]


def test_an_import_waits_for_the_same_one(board: Board) -> None:
    board.record_report(WorkerReport("i", frozenset({IMPORT}), free_slots=1))
    first, second = (offer(task=name, stage=IMPORT, params={"imports": {"base": "s3://b/x"}}) for name in "ab")
    board.hold(first.key, "i", epoch=1, offer=first)
    board.offer(second)
    assert [group.reason for group in groups(board)] == [WaitReason.IMPORTING]


def test_ages_and_numbers_are_those_of_the_board(board: Board) -> None:
    for at, task in ((50.0, "a"), (90.0, "b"), (70.0, "c")):
        board.clock = lambda at=at: at  # type: ignore[misc]
        board.offer(offer(task=task))
    board.offer(offer("blue", stage="gguf"))
    board.clock = lambda: 100.0
    assert [(group.project, group.count, group.age) for group in groups(board)] == [("red", 3, 50.0), ("blue", 1, 30.0)]
    own, other = groups(board, RED)
    assert (own.project, own.count, own.age) == ("red", 3, 50.0)
    assert other == WaitingGroup("gguf", "", 1)


def test_a_long_queue_is_cut_at_its_youngest(board: Board) -> None:
    for number in range(MOST_GROUPS + 50):
        board.clock = lambda number=number: 100.0 + number  # type: ignore[misc]
        board.offer(offer(f"p{number}"))
    board.clock = lambda: 5000.0
    cut = groups(board)
    assert len(cut) == MOST_GROUPS
    assert [group.project for group in cut[:2]] == ["p0", "p1"]
    (hidden,) = groups(board, RED)
    assert hidden == WaitingGroup("merge", "", MOST_GROUPS + 50)


def test_many_tasks_are_counted_in_little_time(board: Board) -> None:
    for number in range(20_000):
        board.offer(offer(f"p{number % 50}", task=f"t{number}"))
    began = time.process_time()
    assert sum(group.count for group in groups(board)) == 20_000
    assert time.process_time() - began < 2.0  # 0.1 s


def test_a_lease_that_is_not_yet_durable_or_of_another_project_shows_no_worker(board: Board) -> None:
    ours, theirs = offer(), offer("blue")
    board.hold(ours.key, "a", epoch=0, offer=ours)
    board.hold(theirs.key, "a", epoch=1, offer=theirs)
    assert seen_workers(board, RED) == ([], 1)
    board.held[ours.key].epoch = 2
    (worker,), hidden = seen_workers(board, RED)
    assert ([one.key for one in worker.running], hidden) == ([ours.key], 0)
    (whole,), _ = seen_workers(board, ALL)
    assert {one.key for one in whole.running} == {ours.key, theirs.key}


def test_after_a_restart_the_stage_of_a_task_is_not_known_yet(board: Board) -> None:
    key = AttemptKey.of("projects/red/exports/x", "t", 1)
    board.hold(key, "a", epoch=3, offer=None)
    (worker,), _ = seen_workers(board, RED)
    assert [(one.key, one.stage) for one in worker.running] == [(key, "")]


def test_a_worker_keeps_its_time_of_joining_until_it_is_forgotten(board: Board) -> None:
    joined = board.workers["a"].joined
    board.record_report(WorkerReport("a", STAGES))
    assert board.workers["a"].joined == joined
    board.record_report(WorkerReport("a", STAGES, draining=True, ending=True))
    assert not board.workers
    board.record_report(WorkerReport("a", STAGES))
    assert board.workers["a"].joined > joined
