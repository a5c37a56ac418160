"""A worker that speaks again just when its lease is taken back: the memory and the tables name the same owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slipway.planning.references import AttemptKey
from slipway.stage_call import StageCall
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.lifecycle.offers import Held, Offer, WorkerReport
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.inbox import InboxEvent
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.storage.leases import Ledger
from support.coordinators.harness import tiny_export, tiny_task

EXPORT = "projects/p/exports/x"
KEY = AttemptKey.of(EXPORT, "m", 1)
SILENT = WorkerReport("silent", frozenset({"merge"}), slots=1, free_slots=1)
OTHER = replace(SILENT, worker="other")


@dataclass(frozen=True, slots=True)
class Slow(Ledger):
    """Tables that take their time to adopt, as a database does that others keep busy."""

    def adopt(self, worker: str, held: Held, offer: Offer | None) -> tuple[bool, InboxEvent | None]:
        """Adopt a lease, later."""
        time.sleep(0.3)
        return Ledger.adopt(self, worker, held, offer)


@dataclass
class Site:
    now: float
    broker: Broker
    database: Database


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    database.prepare()
    database.insert(tiny_export("x", tiny_task("m")).with_(name=EXPORT))
    journal = Journal(database.transactions)
    ledger = Slow(database.leases, database.events)
    place = Site(100.0, Broker(ledger, journal, deliver=lambda _: None, ttl=10.0, clock=lambda: place.now), database)
    yield place
    journal.close()
    database.close()


async def test_the_owner_can_hand_in_its_result(site: Site) -> None:
    broker = site.broker
    await broker.set_offers(EXPORT, [Offer(EXPORT, "m", 1, StageCall("merge", {}, {}))])
    (granted,) = (await broker.synchronize(SILENT)).granted
    waiting = asyncio.create_task(broker.synchronize(OTHER, wait_seconds=20.0))
    await asyncio.sleep(0.05)
    site.now += 11
    taking_back = asyncio.create_task(broker.expire())
    while KEY in broker.board.held:
        await asyncio.sleep(0)
    running = replace(SILENT, free_slots=0, running=(Held(KEY, granted.epoch),))
    answer = await broker.synchronize(running)
    await taking_back
    owner, row = broker.board.held[KEY], site.database.leases.get(str(KEY))
    assert row is not None
    assert (owner.worker, owner.epoch) == (row.worker, row.epoch)
    assert (KEY in answer.cancel) is (owner.worker != "silent")
    await broker.complete(
        owner.worker, Held(KEY, owner.epoch), Event(kind=EventKind.SUCCEEDED, time=0.0, task="m", attempt=1)
    )
    waiting.cancel()
