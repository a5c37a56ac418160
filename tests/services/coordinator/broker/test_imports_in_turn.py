"""What one task imports for the first time no other task imports meanwhile: it waits, and finds the files in the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.registry import IMPORT
from slipway.stage_call import StageCall
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.lifecycle.offers import Granted, Held, Offer, WorkerReport
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.storage.leases import Ledger
from slipway_coordinator.workflow.periodic import Unserved
from support.coordinators.harness import tiny_export, tiny_task
from support.harness.unhurried import unhurried

BASE, OURS, OTHERS = "hf://org/base", "s3://runs/a", "s3://runs/b"


class Setup:
    """A broker over a real database, a clock of our own, and two workers."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.database = Database(f"sqlite:///{folder / 'state.db'}")
        self.database.prepare()
        self.journal = Journal(self.database.transactions)
        ledger = Ledger(self.database.leases, self.database.events)
        self.broker = Broker(ledger, self.journal, deliver=lambda _: None, ttl=10.0, clock=lambda: self.now)

    async def offer(self, export: str, *, stage: str = IMPORT, project: str = "p", **imports: str) -> Offer:
        name = f"projects/{project}/exports/{export}"
        self.database.insert(tiny_export(export, tiny_task("m")).with_(name=name))
        offered = Offer(name, "m", 1, StageCall(stage, {"imports": imports}, {}))
        await self.broker.set_offers(name, [offered])
        return offered

    async def ask(self, worker: str, *running: Granted, stages: tuple[str, ...] = (IMPORT,)) -> list[Granted]:
        held = tuple(Held(granted.offer.key, granted.epoch) for granted in running)
        report = WorkerReport(worker, frozenset(stages), free_slots=int(not held), running=held)
        return list((await self.broker.synchronize(report)).granted)

    async def end(self, worker: str, granted: Granted, kind: EventKind = EventKind.SUCCEEDED) -> None:
        event = Event(kind=kind, time=1.0, task="m", attempt=1, outputs={"base": "x"})
        await self.broker.complete(worker, Held(granted.offer.key, granted.epoch), event)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path)
    yield setup
    setup.journal.close()
    setup.database.close()


@pytest.mark.parametrize("project", ["p", "q"])
async def test_imports_of_an_address_take_turns_until_it_has_been_imported(setup: Setup, project: str) -> None:
    await setup.offer("first", base=BASE, adapter=OURS)
    second = await setup.offer("second", project=project, base=BASE, adapter=OTHERS)
    (first,) = await setup.ask("a")
    assert await setup.ask("b") == []
    await setup.end("a", first)
    (granted,) = await setup.ask("b")
    assert granted.offer == second
    await setup.offer("third", base=BASE, adapter="s3://runs/c")
    assert len(await setup.ask("a")) == 1, "all of the base is in the store by now"


async def test_other_addresses_and_other_stages_do_not_wait(setup: Setup) -> None:
    await setup.offer("first", base=BASE, adapter=OURS)
    (first,) = await setup.ask("a")
    await setup.offer("held-back", base=BASE, adapter=OTHERS)
    await setup.offer("other", base="hf://org/another", adapter="s3://runs/d")
    await setup.offer("unnamed", base="", adapter="s3://runs/c")
    await setup.offer("merge", stage="merge", base=BASE)
    taken = [granted.offer.export for worker in "bc" for granted in await setup.ask(worker)]
    assert [name.rpartition("/")[2] for name in taken] == ["other", "unnamed"]
    (merge,) = await setup.ask("d", stages=("merge",))
    assert merge.offer.stage == "merge"
    assert await setup.ask("e") == []
    await setup.end("a", first)
    assert len(await setup.ask("e")) == 1


@pytest.mark.parametrize("how", ["failed", "cancelled", "withdrawn", "silent"])
async def test_an_import_that_ends_in_any_way_makes_room_for_the_next(setup: Setup, how: str) -> None:
    first = await setup.offer("first", base=BASE)
    (granted,) = await setup.ask("a")
    await setup.offer("second", base=BASE)
    await setup.offer("third", base=BASE)
    assert await setup.ask("b") == []
    match how:
        case "withdrawn":
            await setup.broker.set_offers(first.export, [])
        case "silent":
            setup.now += 11
            await setup.ask("b")
            await setup.broker.set_offers(first.export, [])
            await setup.broker.expire()
        case _:
            await setup.end("a", granted, EventKind(how))
            await setup.broker.set_offers(first.export, [])
    assert len(await setup.ask("b")) == 1
    assert await setup.ask("c") == [], "nothing was imported by that"


async def test_a_worker_with_several_slots_gets_one_of_them(setup: Setup) -> None:
    for export in ("first", "second"):
        await setup.offer(export, base=BASE)
    report = WorkerReport("a", frozenset({IMPORT}), free_slots=2)
    assert len((await setup.broker.synchronize(report)).granted) == 1


async def test_who_waits_for_another_import_hears_of_it_and_does_not_wait_for_ever(setup: Setup) -> None:
    said: list[str] = []

    async def publish(_: str, line: Any) -> None:
        said.append(line.message)

    async def notify(*_: object) -> None:
        raise AssertionError("nothing fails")

    looking = Unserved(setup.broker.board, SimpleNamespace(publish=publish), notify, fail_after=None)  # type: ignore[arg-type]
    await setup.offer("first", base=BASE)
    (first,) = await setup.ask("a")
    await setup.offer("second", base=BASE)
    await looking.check()
    assert said == []
    for _ in range(10):
        setup.now += 9
        await setup.ask("a", first)
        await setup.ask("b")
    await looking.check()
    await looking.check()
    assert said == ["m waits: another task is importing one of its sources, which it then finds in the store"]
    for _ in range(450):
        setup.now += 9
        await setup.ask("a", first)
        if granted := await setup.ask("b"):
            break
    assert granted, "the first may be slow for reasons of its own"
    assert setup.now > 3600


def test_a_long_queue_of_imports_is_looked_through_quickly() -> None:
    from slipway.requirements import Abilities
    from slipway_coordinator.broker.waiting import Waiting

    waiting, known = Waiting(), {"w": Abilities(frozenset({IMPORT}))}
    call = StageCall(IMPORT, {"imports": {"base": BASE}}, {})
    for number in range(10_000):
        imports = {"imports": {"base": BASE, "adapter": f"s3://runs/{number}"}}
        waiting.add(Offer(f"projects/p/exports/e{number}", "m", 1, replace(call, params=imports)))
    began = time.process_time()
    for _ in range(10):
        assert waiting.first("w", known, projects=waiting.projects, importing={BASE}) is None
    assert time.process_time() - began < unhurried(0.5)
    assert waiting.first("w", known, projects=waiting.projects, importing={OURS}) is not None
