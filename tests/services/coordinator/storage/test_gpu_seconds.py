"""GPU seconds of projects: each second of a lease on GPUs counts once, however the lease ends; in SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from slipway.planning.references import AttemptKey
from slipway.requirements import Needs, Requirements
from slipway.security.access.projects import WINDOW_DAYS
from slipway.stage_call import StageCall
from slipway_coordinator.lifecycle.offers import Held, Offer
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import state_at
from slipway_coordinator.storage.leases import Ledger
from slipway_coordinator.storage.projects.gpu_seconds import DAY_SECONDS
from support.coordinators.harness import tiny_export, tiny_task

NOON = 20_000 * DAY_SECONDS + DAY_SECONDS / 2
EXPORT = "projects/red/exports/x"
ON_GPU = Requirements(any_of=(Needs(gpu=True),))
M, N = (AttemptKey.of(EXPORT, task, 1) for task in "mn")


@dataclass
class Leasing:
    """A state whose clock a test sets."""

    url: str
    now: float = NOON

    def open(self) -> None:
        self.database = Database(self.url)
        self.database.prepare()
        self.database.gpu_seconds.clock = lambda: self.now
        self.ledger = Ledger(self.database.leases, self.database.events)

    def restart(self) -> None:
        self.database.close()
        self.open()

    def grant(
        self, key: AttemptKey = M, *, worker: str = "w", gpus: float = 1, requirements: Requirements = ON_GPU
    ) -> Held:
        call = StageCall("merge", {}, {})
        offer = Offer(key.export, key.task, key.attempt, call, requirements=requirements)
        (epoch,), _ = self.ledger.grant([offer], worker, gpus=gpus)
        assert epoch is not None
        return Held(key, epoch)

    def complete(self, held: Held, kind: EventKind = EventKind.SUCCEEDED, *, worker: str = "w") -> bool:
        event = Event(kind=kind, time=self.now, task=held.task.task, attempt=held.task.attempt)
        return self.ledger.complete(worker, held, event)[0]

    def seconds(self, project: str = "red") -> float:
        for each in (self.database.gpu_seconds.by_project(), self.database.gpu_seconds.of_each(["none", project])):
            assert each.get(project, 0.0) == sum(self.days(project).values())
        return sum(self.days(project).values())

    def days(self, project: str = "red") -> dict[int, float]:
        return self.database.gpu_seconds.by_day(project)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def state_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def leasing(place: str) -> Iterator[Leasing]:
    leasing = Leasing(state_at(place).url)
    database = Database(leasing.url)
    database.migrate()
    database.close()
    leasing.open()
    leasing.database.insert(tiny_export("x", tiny_task("m"), tiny_task("n")).with_(name=EXPORT))
    yield leasing
    leasing.database.close()


@pytest.mark.parametrize("kind", [EventKind.SUCCEEDED, EventKind.FAILED, EventKind.CANCELLED])
def test_a_lease_counts_while_it_runs_and_once_when_it_ends(leasing: Leasing, kind: EventKind) -> None:
    held = leasing.grant(gpus=4)
    assert leasing.seconds() == 0
    leasing.now += 10
    assert leasing.seconds() == 40
    leasing.restart()
    leasing.now += 5
    assert leasing.seconds() == 60, "a restart loses nothing"
    for _ in range(2):  # a worker repeats a result until it knows that it is stored
        assert leasing.complete(held, kind)
        leasing.now += 100
        assert leasing.seconds() == 60
    leasing.restart()
    assert leasing.seconds() == 60
    assert leasing.seconds("blue") == 0


@pytest.mark.parametrize(
    ("requirements", "counts"),
    [
        (ON_GPU, True),
        (Requirements(prefers=(Needs(libraries=("x",)), Needs(gpu=True))), True),
        (Requirements(any_of=(Needs(gpu=True), Needs(memory_bytes=1))), False),
        (Requirements(prefers=(Needs(libraries=("x",)),)), False),
        (Requirements(), False),
    ],
)
def test_tasks_count_that_need_or_prefer_a_gpu(leasing: Leasing, requirements: Requirements, counts: bool) -> None:
    leasing.grant(gpus=0.5, requirements=requirements)
    leasing.now += 10
    assert leasing.seconds() == (5 if counts else 0)
    assert requirements.uses_gpu is counts


def test_workers_without_a_gpu_count_nothing(leasing: Leasing) -> None:
    held = leasing.grant(gpus=0)
    leasing.now += 10
    assert leasing.seconds() == 0
    assert leasing.complete(held)
    assert leasing.days() == {}


def test_a_silent_worker_counts_until_its_lease_expires(leasing: Leasing) -> None:
    held = leasing.grant()
    leasing.now += 30
    for _ in range(2):  # as if it were unknown whether that was stored
        assert leasing.ledger.expire("w", held, None, revoked=False)[0]
        leasing.now += 25
    assert leasing.seconds() == 30
    again = leasing.grant(worker="v", gpus=2)
    leasing.now += 10
    assert not leasing.complete(held), "the first worker lost it"
    assert leasing.seconds() == 50
    assert leasing.complete(again, worker="v")
    assert leasing.seconds() == 50


def test_the_silence_of_a_worker_that_comes_back_does_not_count(leasing: Leasing) -> None:
    first, second = leasing.grant(M), leasing.grant(N)
    leasing.now += 30
    for held in (first, second):
        assert leasing.ledger.expire("w", held, None, revoked=False)[0]
    leasing.now += 20
    leasing.restart()
    assert leasing.seconds() == 60
    for _ in range(2):
        assert leasing.ledger.adopt("w", first, None)[0]
        leasing.now += 5
    assert leasing.seconds() == 70
    assert leasing.complete(first)
    assert leasing.complete(second), "it has its result before it is adopted"
    assert leasing.seconds() == 70


def test_of_an_outage_the_time_in_which_leases_expire_counts_at_most(leasing: Leasing) -> None:
    first = leasing.grant(M)
    leasing.now += 100
    leasing.database.gpu_seconds.note_alive()
    leasing.now += 10
    second = leasing.grant(N)
    leasing.now += 5
    leasing.restart()
    leasing.database.leases.end_outage(lease_seconds=30, workers_gone=False)
    assert leasing.seconds() == 115 + 5, "a short one counts wholly"
    leasing.database.gpu_seconds.note_alive()
    leasing.now += 2 * DAY_SECONDS
    leasing.restart()
    for _ in range(2):
        leasing.database.leases.end_outage(lease_seconds=30, workers_gone=False)
    assert leasing.seconds() == 120 + 2 * 30
    leasing.now += 10
    assert leasing.complete(first)
    leasing.database.leases.end_outage(lease_seconds=30, workers_gone=True)
    leasing.now += 10
    assert leasing.complete(second)
    assert leasing.seconds() == 180 + 2 * 10


def test_days_that_a_wrong_clock_left_ahead_do_not_count(leasing: Leasing) -> None:
    leasing.now += 10 * DAY_SECONDS
    held = leasing.grant()
    leasing.now += 10
    assert leasing.complete(held)
    leasing.now -= 10 * DAY_SECONDS
    assert leasing.seconds() == 0
    leasing.now += 10 * DAY_SECONDS
    assert leasing.seconds() == 10


def test_what_is_not_wanted_any_more_counts_until_then(leasing: Leasing) -> None:
    leasing.grant(M)
    leasing.grant(N, gpus=3)
    leasing.now += 10
    offer = Offer(EXPORT, "m", 1, StageCall("merge", {}, {}))
    for _ in range(2):
        leasing.ledger.settle(EXPORT, {M: offer}, new=(), revoked=())
        leasing.now += 10
    assert leasing.seconds() == 30 + 30
    leasing.database.delete(EXPORT)
    leasing.now += 10
    assert leasing.seconds() == 20 + 10 + 30
    leasing.restart()
    assert leasing.seconds() == 60, "what a deleted export used stays used"


def test_time_is_that_of_its_days_and_leaves_the_window_with_them(leasing: Leasing) -> None:
    held = leasing.grant(gpus=2)
    leasing.now += 2 * DAY_SECONDS
    expected = {20_000: DAY_SECONDS, 20_001: 2 * DAY_SECONDS, 20_002: DAY_SECONDS}
    assert leasing.days() == expected, "of a running task"
    assert leasing.complete(held)
    assert leasing.days() == expected
    leasing.now = NOON + (WINDOW_DAYS - 1) * DAY_SECONDS
    assert leasing.seconds() == 4 * DAY_SECONDS
    leasing.now += DAY_SECONDS
    assert leasing.days() == {day: seconds for day, seconds in expected.items() if day > 20_000}
    held = leasing.grant(N)
    leasing.now += 40 * DAY_SECONDS
    assert leasing.seconds() == (WINDOW_DAYS - 0.5) * DAY_SECONDS, "of a running task, only what is in the window"
    assert leasing.complete(held)
    assert leasing.seconds() == (WINDOW_DAYS - 0.5) * DAY_SECONDS
    leasing.now += 500 * DAY_SECONDS
    leasing.database.gpu_seconds.forget_old()
    leasing.now -= 500 * DAY_SECONDS
    assert leasing.days() == {}


def test_a_clock_that_is_set_back_takes_nothing_away(leasing: Leasing) -> None:
    held = leasing.grant()
    leasing.now -= 3600
    assert leasing.seconds() == 0
    assert leasing.complete(held)
    assert leasing.seconds() == 0


def test_a_transaction_that_is_rolled_back_ends_nothing(leasing: Leasing) -> None:
    held = leasing.grant()
    leasing.now += 10
    with contextlib.suppress(ZeroDivisionError), leasing.database.transactions.begin():
        assert leasing.complete(held)
        assert leasing.seconds() == 10
        _ = 1 / 0
    leasing.now += 10
    assert leasing.seconds() == 20
    assert leasing.complete(held)
    assert leasing.seconds() == 20
