"""A database that fails for a moment: nobody knows whether a change was committed, and nothing is lost for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway.stage_call import StageCall
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.lifecycle.offers import Granted, Held, Offer, WorkerReport
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.inbox import InboxEvent
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.storage.leases import Ledger
from support.coordinators.harness import Harness, state, tiny_export, tiny_task

EXPORT = "projects/p/exports/x"
A = WorkerReport("a", frozenset({"merge"}), free_slots=1)
OFFER = Offer(EXPORT, "m", 1, StageCall("merge", {}, {}))


class Doubtful(Journal):
    """Loses the answers to some commits."""

    lost = 0

    def _apply_together(self, changes: Sequence[Callable[[], Any]]) -> list[Any]:
        results = super()._apply_together(changes)
        if self.lost:
            self.lost -= 1
            raise sa.exc.OperationalError("COMMIT", {}, Exception("the server closed the connection"))
        return results


class Place:
    """A broker over a database that fails for a moment."""

    def __init__(self, home: Path) -> None:
        self.now = 100.0
        self.told: list[InboxEvent | None] = []
        self.database = Database(f"sqlite:///{home / 'state.db'}")
        self.database.prepare()
        self.database.insert(tiny_export("x", tiny_task("m")).with_(name=EXPORT))
        self.journal = Doubtful(self.database.transactions)
        ledger = Ledger(self.database.leases, self.database.events)
        self.broker = Broker(ledger, self.journal, deliver=self.told.append, ttl=10.0, clock=lambda: self.now)

    async def lease(self) -> Granted:
        await self.broker.set_offers(EXPORT, [OFFER])
        (granted,) = (await self.broker.synchronize(A)).granted
        return granted

    def heard(self) -> list[str]:
        return [message.event.kind.value for message in self.told if message is not None]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.journal.close()
    place.database.close()


def test_a_result_reaches_the_workflow_when_its_worker_hands_it_in_again(place: Place) -> None:
    async def story() -> None:
        granted = await place.lease()
        held = Held(OFFER.key, granted.epoch)
        result = Event(kind=EventKind.SUCCEEDED, time=0.0, task="m", attempt=1)
        place.journal.lost = 1
        with pytest.raises(ServiceError) as caught:
            await place.broker.complete("a", held, result)
        assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
        assert place.heard() == ["leased"]
        await place.broker.complete("a", held, result)
        assert place.heard() == ["leased", "succeeded"]

    asyncio.run(story())
    assert [message.event.kind.value for message in place.database.events.read(EXPORT, 1)] == ["leased", "succeeded"]


async def test_a_lease_of_a_silent_worker_is_taken_back_the_next_time(place: Place) -> None:
    await place.lease()
    place.now += 11
    place.journal.lost = 1
    with pytest.raises(ServiceError):
        await place.broker.expire()
    await place.broker.expire()
    assert place.heard() == ["leased", "lease_lost"]
    (again,) = (await place.broker.synchronize(WorkerReport("b", frozenset({"merge"}), free_slots=1))).granted
    assert again.epoch == 2


async def test_a_workflow_that_says_what_it_wants_is_heard_in_the_end(place: Place) -> None:
    place.journal.lost = 2
    assert (await place.lease()).epoch == 1


@pytest.mark.slow
def test_exports_outlive_a_database_that_fails_now_and_then(tmp_path: Path) -> None:
    begun = 0

    def fail(_: sa.Connection) -> None:
        nonlocal begun
        begun += 1
        if begun % 4 == 0:
            raise sa.exc.OperationalError("BEGIN", {}, Exception("the server closed the connection"))

    tasks = (tiny_task("a"), tiny_task("b", needs=("a",)), tiny_task("c", needs=("b",)))
    with Harness(tmp_path) as harness:
        base, engine = harness.base(), harness.server.coordinator.database._engine
        names = [harness.submit(tiny_export(f"x{number}", *tasks, base=base)) for number in range(3)]
        sa.event.listen(engine, "begin", fail)
        for name in names:
            record = harness.run(lambda name=name: ended(harness, name))
            assert record == "succeeded"
        sa.event.remove(engine, "begin", fail)
        assert begun > 20
        assert {state(harness.client.get_export(name)) for name in names} == {"succeeded"}


async def ended(harness: Harness, name: str) -> str:
    """The state in which an export ends, read past a database that fails."""
    while True:
        try:
            record = await harness.server.coordinator.load(name)
        except ServiceError:
            record = None
        if record is not None and record.state.ended:
            return record.state.value
        await asyncio.sleep(0.1)
