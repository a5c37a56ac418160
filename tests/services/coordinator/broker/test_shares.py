"""Projects share the workers by their weights, whatever they queue, and none waits without end."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.planning.references import AttemptKey
from slipway.security.access.projects import ProjectLimits, Projects
from slipway.stage_call import StageCall
from slipway_coordinator.broker.board import Board
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.lifecycle.offers import Held, Offer, WorkerReport
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.storage.leases import Ledger
from support.coordinators.harness import tiny_export, tiny_task
from support.harness.unhurried import unhurried

WINDOW = 150


def offer(project: str, number: int, *, stage: str = "merge", priority: int = 0) -> Offer:
    return Offer(f"projects/{project}/exports/e{number}", "m", 1, StageCall(stage, {}, {}), priority=priority)


class Simulated:
    """A board with workers of one slot each, whose tasks take as long as they are told."""

    def __init__(self, weights: Mapping[str, int], *, stages: Mapping[str, tuple[str, ...]]) -> None:
        named = {name: ProjectLimits(weight=weight) for name, weight in weights.items()}
        self.now = 0.0
        self.board = Board(1e9, lambda: self.now, lambda: Projects(named))
        self.reports = {name: WorkerReport(name, frozenset(kinds), free_slots=1) for name, kinds in stages.items()}
        for report in self.reports.values():
            self.board.record_report(report)
        self.idle = list(self.reports)
        self._ends: list[tuple[float, int, str, AttemptKey]] = []
        self._leased = 0

    def leases(self, seconds: Callable[[Offer], float]) -> Iterator[Offer]:
        """Lease to whichever worker is free, until nothing waits."""
        while self.board.waiting:
            worker = next(self._free(), None)
            if worker is None:
                return
            for chosen in self.board.choose(self.reports[worker], free=1, busy=0):
                self.idle.remove(worker)
                self._leased += 1
                heapq.heappush(self._ends, (self.now + seconds(chosen), self._leased, worker, chosen.key))
                yield chosen
                break
            else:
                if not self.end_one():
                    return

    def end_one(self) -> bool:
        """End the task that ends first."""
        if not self._ends:
            return False
        self.now, _, worker, key = heapq.heappop(self._ends)
        del self.board.held[key]
        self.idle.append(worker)
        return True

    def running(self) -> set[str]:
        """Projects with running tasks."""
        return {lease.offer.project for lease in self.board.held.values() if lease.offer is not None}

    def take(self, number: int, step: str, *given: Any) -> list[Offer]:
        """Take one step of a random run: offer tasks of a project, lease to a worker, or end the oldest tasks."""
        match step:
            case "offer":
                project, count, priority = given
                for each in range(count):
                    self.board.offer(offer(project, 100 * number + each, priority=priority))
            case "lease":
                return self.board.choose(self.reports[f"w{given[0]}"], free=1, busy=0)
            case "end":
                for key in list(self.board.held)[: given[0]]:
                    del self.board.held[key]
        return []

    def _free(self) -> Iterator[str]:
        while not self.idle and self.end_one():
            pass
        yield from self.idle


def shares(projects: list[str], weights: Mapping[str, int]) -> float:
    """Largest error of a project's share in any window."""
    total = sum(weights.values())
    return max(
        abs(Counter(projects[at : at + WINDOW])[name] / WINDOW - weight / total)
        for at in range(len(projects) - WINDOW + 1)
        for name, weight in weights.items()
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 1, 2)])
def test_a_long_queue_drains_by_weights(weights: tuple[int, ...], workers: int) -> None:
    by_name = dict(zip("abc", weights, strict=True))
    simulated = Simulated(by_name, stages={f"w{number}": ("merge",) for number in range(workers)})
    counts = {"a": 500, "b": 500, "c": 1000} if 2 in weights else {"a": 667, "b": 667, "c": 666}
    for name, count in counts.items():  # one project after the other, the first ones with the highest priority
        for number in range(count):
            simulated.board.offer(offer(name, number, priority={"a": 100, "b": 0, "c": -100}[name]))
    leased = [each.project for each in simulated.leases(lambda _: 1.0)]
    assert len(leased) == 2000
    everybody = min(max(at for at, name in enumerate(leased) if name == project) for project in by_name)
    assert everybody > 1900
    assert shares(leased[:everybody], by_name) <= 0.10 * min(weights) / sum(weights)


def test_urgent_exports_of_one_project_keep_no_other_out() -> None:
    simulated = Simulated({}, stages={"w": ("merge",)})
    for number in range(20):
        simulated.board.offer(offer("loud", number, priority=100))
    simulated.board.offer(offer("quiet", 0, priority=-100))
    leased = [each.project for each in simulated.leases(lambda _: 1.0)]
    assert leased.index("quiet") == 1


def test_long_tasks_do_not_take_all_workers() -> None:
    simulated = Simulated({}, stages={f"w{number}": ("merge",) for number in range(4)})
    for number in range(400):
        simulated.board.offer(offer("long", number))
        simulated.board.offer(offer("short", number))
    running: list[int] = []
    for chosen in simulated.leases(lambda each: 1000.0 if each.project == "long" else 1.0):
        running.append(
            sum(lease.offer is not None and lease.offer.project == "long" for lease in simulated.board.held.values())
        )
        if chosen.project == "short" and simulated.board.waiting.projects == {"long"}:
            break
    assert max(running) == 2
    assert simulated.now < 250, "the short ones had two workers for themselves"


def test_what_a_project_had_of_other_workers_does_not_count() -> None:
    simulated = Simulated({}, stages={"gpu": ("gpu",), "cpu": ("cpu",)})
    for number in range(300):
        simulated.board.offer(offer("a", number, stage="gpu"))
    for number in range(300, 340):
        simulated.board.offer(offer("a", number, stage="cpu"))
        simulated.board.offer(offer("b", number, stage="cpu"))
    leased = [
        each.project
        for each in simulated.leases(lambda each: 0.1 if each.stage == "gpu" else 1.0)
        if each.stage == "cpu"
    ]
    assert Counter(leased[:20]) == {"a": 10, "b": 10}


def test_a_project_that_comes_later_gets_its_share_and_not_more() -> None:
    simulated = Simulated({}, stages={"w": ("merge",)})
    for number in range(500):
        simulated.board.offer(offer("early", number))
    leased = []
    for chosen in simulated.leases(lambda _: 1.0):
        leased.append(chosen.project)
        if len(leased) == 300:
            for number in range(100):
                simulated.board.offer(offer("late", number))
    assert Counter(leased[300:340]) == {"early": 20, "late": 20}


PROJECTS = st.sampled_from("abcde")
STEPS = st.one_of(
    st.tuples(st.just("offer"), PROJECTS, st.integers(1, 8), st.integers(-100, 100)),
    st.tuples(st.just("lease"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 10)),
)


@settings(max_examples=150, deadline=None)
@given(
    weights=st.dictionaries(PROJECTS, st.integers(1, 5)),
    steps=st.lists(STEPS, max_size=150),
)
def test_no_project_that_runs_nothing_waits_for_many_turns(
    weights: dict[str, int], steps: list[tuple[Any, ...]]
) -> None:
    """While it waits, another project gets at most what its weight is worth, and two turns that it may have been behind."""
    simulated = Simulated(weights, stages={f"w{number}": ("merge",) for number in range(6)})
    passed: dict[str, Counter[str]] = {}
    for number, step in enumerate(steps):
        for chosen in simulated.take(number, *step):
            passed.pop(chosen.project, None)
            for counts in passed.values():
                counts[chosen.project] += 1
        idle = simulated.board.waiting.projects - simulated.running()
        passed = {project: passed.get(project, Counter()) for project in idle}
        for project, counts in passed.items():
            for other, count in counts.items():
                assert count <= math.ceil(weights.get(other, 1) / weights.get(project, 1)) + 4


async def test_turns_go_on_after_a_restart(tmp_path: Path) -> None:
    """What runs is known from the leases, so the next coordinator does not give one project everything again."""
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    database.prepare()
    journal = Journal(database.transactions)

    def broker() -> Broker:
        return Broker(Ledger(database.leases, database.events), journal, deliver=lambda _: None, ttl=1000.0)

    async def ask(asked: Broker, worker: str, *running: Held) -> list[tuple[Offer, int]]:
        report = WorkerReport(worker, frozenset({"merge"}), free_slots=1 - len(running), running=running)
        return [(one.offer, one.epoch) for one in (await asked.synchronize(report)).granted]

    offers = [offer(project, number) for number in range(4) for project in ("a", "b")]
    first = broker()
    for each in offers:
        database.insert(tiny_export(each.export, tiny_task("m")).with_(name=each.export))
        await first.set_offers(each.export, [each])
    held = {worker: (await ask(first, worker))[0] for worker in ("w0", "w1")}
    assert {one.project for one, _ in held.values()} == {"a", "b"}
    second = broker()
    for each in offers:
        await second.set_offers(each.export, [each])
    (lost,) = [worker for worker, (one, _) in held.items() if one.project == "b"]
    for worker, (one, epoch) in held.items():
        if worker != lost:
            await ask(second, worker, Held(one.key, epoch))
    ((taken, _),) = await ask(second, "w2")
    assert taken.project in {"a", "b"}
    projects = [(await ask(second, f"w{number}"))[0][0].project for number in range(3, 7)]
    assert Counter([*projects, taken.project, "a", "b"]) in (Counter(a=4, b=3), Counter(a=3, b=4))
    journal.close()
    database.close()


def test_a_turn_takes_little_time_in_a_long_queue() -> None:
    simulated = Simulated({}, stages={"w": ("merge",)})
    for number in range(10_000):
        simulated.board.offer(offer(f"p{number % 300}", number, priority=number % 7))
    began = time.process_time()
    for _ in range(100):
        simulated.board.choose(simulated.reports["w"], free=1, busy=0)
        simulated.board.held.clear()
    assert time.process_time() - began < unhurried(0.5)
