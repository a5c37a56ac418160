"""Leases: one owner at a time, epochs, expiry, adoption, cancellation; over a real database and a clock of our own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipway.errors import ServiceError
from slipway.planning.references import AttemptKey
from slipway.stage_call import Limits, StageCall
from slipway_coordinator.broker import broker as broker_module
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.lifecycle.offers import Answer, Granted, Held, Offer, WorkerReport
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.inbox import InboxEvent
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.storage.leases import LeaseState, Ledger
from support.coordinators.harness import tiny_export, tiny_task

EXPORT = "projects/p/exports/x"
STAGES = frozenset({"merge"})
A = WorkerReport("a", STAGES, free_slots=1, memory_bytes=1000)
B = replace(A, worker="b")


def offer(task: str = "m", attempt: int = 1, **more: object) -> Offer:
    return Offer(EXPORT, task, attempt, StageCall("merge", {}, {}), **more)  # type: ignore[arg-type]


@dataclass
class Setup:
    database: Database
    journal: Journal
    now: float = 100.0

    def broker(self) -> Broker:
        ledger = Ledger(self.database.leases, self.database.events)
        return Broker(ledger, self.journal, deliver=self.delivered.append, ttl=10.0, clock=lambda: self.now)

    def __post_init__(self) -> None:
        self.delivered: list[InboxEvent | None] = []

    def kinds(self) -> list[str]:
        """What the workflow of the export is told, in order."""
        stored = self.database.events.read(EXPORT, 1)
        told = {
            message.number: message for message in self.delivered if message is not None
        }  # told again, it is the same
        assert list(told.values()) == stored
        return [message.event.kind.value for message in stored]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    database.prepare()
    database.insert(tiny_export("x", tiny_task("m")).with_(name=EXPORT))
    journal = Journal(database.transactions)
    yield Setup(database, journal)
    journal.close()
    database.close()


@pytest.mark.parametrize("ending", [True, False])
def test_the_workflow_is_told_whether_a_silent_worker_had_been_told_to_end(setup: Setup, ending: bool) -> None:
    """As a node that is taken away tells its pods, and does not wait for them."""

    async def run() -> None:
        broker = setup.broker()
        granted = await lease(broker)
        await broker.synchronize(replace(holding(A, granted), draining=ending, ending=ending))
        setup.now += 11
        await broker.expire()

    asyncio.run(run())
    lost = setup.database.events.read(EXPORT, 1)[-1].event
    assert (lost.kind, lost.departed) == (EventKind.LEASE_LOST, ending)


def holding(report: WorkerReport, granted: Granted) -> WorkerReport:
    return replace(report, free_slots=0, running=(Held(granted.offer.key, granted.epoch),))


def done(attempt: int = 1, kind: EventKind = EventKind.SUCCEEDED) -> Event:
    return Event(kind=kind, time=0.0, task="m", attempt=attempt)


async def lease(broker: Broker, report: WorkerReport = A, *offers: Offer) -> Granted:
    await broker.set_offers(EXPORT, offers or (offer(),))
    (granted,) = (await broker.synchronize(report)).granted
    return granted


async def test_a_task_is_leased_once(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    assert granted.epoch == 1
    assert (await broker.synchronize(B)).granted == ()
    assert setup.kinds() == ["leased"]


async def test_a_parked_call_does_not_renew_leases(setup: Setup) -> None:
    """Its worker may be gone, which nobody notices while the machine or the network is."""
    broker = setup.broker()  # ttl 10
    granted = await lease(broker)
    parked = asyncio.create_task(broker.synchronize(holding(A, granted), wait_seconds=50))
    await asyncio.sleep(0.05)
    setup.now += 3
    await broker.expire()  # which wakes parked calls
    await asyncio.sleep(0.05)
    assert not parked.done()
    setup.now += 1
    await broker.expire()
    assert await asyncio.wait_for(parked, 60) == Answer(), "in time to call again"
    setup.now += 6.5
    await broker.expire()
    assert setup.kinds() == ["leased", "lease_lost"], "10 s after the call came"
    assert [one.epoch for one in (await broker.synchronize(B)).granted] == [2]


async def test_a_parked_call_of_a_worker_that_has_called_again_changes_nothing(setup: Setup) -> None:
    """Its connection may be broken, which the coordinator has not noticed; what it said before is not so any more."""
    broker = setup.broker()
    granted = await lease(broker)
    busy = holding(A, granted)
    parked = [asyncio.create_task(broker.synchronize(report, wait_seconds=50)) for report in (busy, B)]
    await asyncio.sleep(0.05)
    assert broker.board.demand(STAGES) == 1
    await broker.synchronize(replace(busy, draining=True, ending=True))
    await broker.synchronize(replace(B, draining=True, ending=True))
    await broker.expire()  # which wakes parked calls
    assert await asyncio.wait_for(asyncio.gather(*parked), 5) == [Answer(), Answer()]
    assert broker.board.demand(STAGES) == 0, "a worker that ends is no replica"
    await broker.set_offers(EXPORT, [offer(), offer("n")])
    assert broker.board.waiting.keys() == {offer("n").key}, "no worker is left that takes it"
    assert broker.board.workers.keys() == {"a"}


async def test_a_parked_call_hears_of_a_cancellation(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    parked = asyncio.create_task(broker.synchronize(holding(A, granted), wait_seconds=50))
    await asyncio.sleep(0.05)
    await broker.set_offers(EXPORT, [offer()], revoked=[granted.offer.key])
    assert (await asyncio.wait_for(parked, 60)).cancel == (granted.offer.key,)


async def test_workers_get_only_their_stages_and_as_many_as_they_have_room_for(setup: Setup) -> None:
    broker = setup.broker()
    await broker.set_offers(EXPORT, [offer("m"), offer("n"), offer("o")])
    assert (await broker.synchronize(replace(A, stages=frozenset({"other"})))).granted == ()
    assert (await broker.synchronize(replace(A, draining=True))).granted == ()
    assert len((await broker.synchronize(replace(A, free_slots=2))).granted) == 2


async def test_an_attempt_that_failed_on_a_worker_is_left_to_another(setup: Setup) -> None:
    broker = setup.broker()
    await broker.synchronize(A)
    await broker.synchronize(replace(B, free_slots=0))
    await broker.set_offers(EXPORT, [offer(not_before=time.time() - 1, avoid=("a",))])
    assert (await broker.synchronize(A)).granted == (), "the other one is there, though it is busy"
    assert len((await broker.synchronize(B)).granted) == 1


async def test_an_attempt_that_waits_is_leased_when_its_time_has_come(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = setup.broker()
    due = time.time() + 600
    await broker.set_offers(EXPORT, [offer(not_before=due)])
    assert (await broker.synchronize(A)).granted == ()
    await broker.expire()
    assert (await broker.synchronize(A)).granted == ()
    monkeypatch.setattr(broker_module, "time", SimpleNamespace(time=lambda: due + 0.01))
    await broker.expire()
    assert len((await broker.synchronize(A)).granted) == 1


async def test_a_waiting_worker_is_woken_by_an_offer(setup: Setup) -> None:
    broker = setup.broker()
    broker.clock = asyncio.get_running_loop().time
    waiting = asyncio.create_task(broker.synchronize(A, wait_seconds=20))
    await asyncio.sleep(0.02)
    await broker.set_offers(EXPORT, [offer()])
    answer = await asyncio.wait_for(waiting, 60)
    assert len(answer.granted) == 1


async def test_an_answer_that_was_lost_is_given_again(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    again = (await broker.synchronize(A)).granted
    assert [(g.offer.key, g.epoch) for g in again] == [(granted.offer.key, granted.epoch)]


async def test_what_a_worker_has_no_room_for_any_more_goes_to_another(setup: Setup) -> None:
    broker = setup.broker()
    await lease(broker)  # the answer is lost, and the worker does something else by now
    full = replace(A, free_slots=0)
    for _ in range(3):
        setup.now += 4
        assert (await broker.synchronize(full)).granted == ()
    await broker.expire()
    (again,) = (await broker.synchronize(B)).granted
    assert again.epoch == 2


async def test_silence_moves_the_task_to_another_worker_and_the_late_result_is_refused(setup: Setup) -> None:
    broker = setup.broker()
    first = await lease(broker)
    setup.now += 11
    await broker.expire()
    (second,) = (await broker.synchronize(B)).granted
    assert second.epoch == 2
    assert (await broker.synchronize(holding(A, first))).cancel == (first.offer.key,)
    with pytest.raises(ServiceError) as caught:
        await broker.complete("a", Held(first.offer.key, first.epoch), done())
    assert caught.value.reason == "LEASE_LOST"
    await broker.complete("b", Held(second.offer.key, second.epoch), done())
    assert setup.kinds() == ["leased", "lease_lost", "leased", "succeeded"]


async def test_reports_keep_a_lease_alive(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    for _ in range(5):
        setup.now += 8
        assert (await broker.synchronize(holding(A, granted))).cancel == ()
        await broker.expire()
    assert setup.kinds() == ["leased"]


async def test_an_expired_lease_is_taken_up_again_by_its_owner_if_nobody_else_has_it(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    setup.now += 11
    await broker.expire()
    assert await broker.synchronize(holding(A, granted)) == Answer()
    assert (await broker.synchronize(B)).granted == ()
    await broker.complete("a", Held(granted.offer.key, 1), done())
    assert setup.kinds() == ["leased", "lease_lost", "leased", "succeeded"]


async def test_after_a_restart_running_tasks_are_adopted(setup: Setup) -> None:
    granted = await lease(setup.broker())
    restarted = setup.broker()
    # The worker may come before the export's workflow is back, or after.
    assert (await restarted.synchronize(holding(A, granted))).cancel == ()
    await restarted.set_offers(EXPORT, [offer()])
    assert (await restarted.synchronize(B)).granted == ()
    await restarted.complete("a", Held(granted.offer.key, granted.epoch), done())
    assert setup.kinds() == ["leased", "succeeded"]


async def test_after_a_restart_a_silent_owner_loses_its_task_only_after_the_usual_time(setup: Setup) -> None:
    await lease(setup.broker())
    restarted = setup.broker()
    await restarted.set_offers(EXPORT, [offer()])
    setup.now += 9
    await restarted.expire()
    assert (await restarted.synchronize(B)).granted == ()
    setup.now += 2
    await restarted.expire()
    assert (await restarted.synchronize(B)).granted[0].epoch == 2


async def test_when_all_workers_are_known_to_be_gone_tasks_are_free_at_once(setup: Setup) -> None:
    await lease(setup.broker())
    setup.database.leases.expire_all()
    restarted = setup.broker()
    await restarted.set_offers(EXPORT, [offer()])
    assert (await restarted.synchronize(B)).granted[0].epoch == 2
    assert setup.kinds() == ["leased", "lease_lost", "leased"]


async def test_a_result_may_be_handed_in_twice_and_its_task_is_not_offered_again(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    held = Held(granted.offer.key, granted.epoch)
    await broker.complete("a", held, done())
    await broker.complete("a", held, done())
    await broker.set_offers(EXPORT, [offer()])  # the workflow has not read the message yet
    assert (await broker.synchronize(B)).granted == ()
    await setup.broker().complete("a", held, done())  # nor does a restart forget it
    assert setup.kinds() == ["leased", "succeeded"]


async def test_a_cancelled_task_is_ended_by_its_worker(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    await broker.set_offers(EXPORT, [offer()], revoked=[granted.offer.key])
    assert (await broker.synchronize(holding(A, granted))).cancel == (granted.offer.key,)
    await broker.complete("a", Held(granted.offer.key, 1), done(kind=EventKind.CANCELLED))
    assert setup.kinds() == ["leased", "cancelled"]


async def test_a_task_that_is_adopted_while_its_cancellation_is_stored_is_ended(setup: Setup) -> None:
    granted = await lease(setup.broker())
    restarted, report = setup.broker(), holding(A, granted)
    cancelling = restarted.set_offers(EXPORT, [offer()], revoked=[granted.offer.key])
    await asyncio.gather(cancelling, restarted.synchronize(report))
    assert (await restarted.synchronize(report)).cancel == (granted.offer.key,)


async def test_a_task_handed_back_goes_to_another_even_if_an_older_report_arrives_late(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    await broker.complete("a", Held(granted.offer.key, 1), done(kind=EventKind.CANCELLED))
    assert (await broker.synchronize(holding(A, granted))).cancel == (granted.offer.key,)
    await broker.set_offers(EXPORT, [offer()])
    assert (await broker.synchronize(B)).granted[0].epoch == 2


async def test_a_cancelled_task_of_a_silent_worker_counts_as_ended(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    await broker.set_offers(EXPORT, [offer()], revoked=[granted.offer.key])
    setup.now += 11
    await broker.expire()
    assert setup.kinds() == ["leased", "cancelled"]


async def test_what_is_not_wanted_any_more_is_withdrawn_everywhere(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker)
    await broker.set_offers(EXPORT, ())
    assert (await broker.synchronize(holding(A, granted))).cancel == (granted.offer.key,)
    assert setup.database.leases.get(granted.offer.key).state is LeaseState.ENDED  # type: ignore[union-attr]
    await broker.set_offers(EXPORT, [offer("other")])
    await broker.set_offers(EXPORT, ())
    assert (await broker.synchronize(B)).granted == ()


async def test_a_task_of_an_export_nobody_knows_is_cancelled(setup: Setup) -> None:
    report = replace(A, running=(Held(AttemptKey.parse("projects/p/exports/deleted:m:1"), 1),))
    assert (await setup.broker().synchronize(report)).cancel == ("projects/p/exports/deleted:m:1",)


async def test_an_exclusive_task_runs_alone(setup: Setup) -> None:
    broker = setup.broker()
    roomy = replace(A, free_slots=3)
    await broker.set_offers(EXPORT, [offer("alone", exclusive=True), offer("n"), offer("o")])
    (first,) = (await broker.synchronize(roomy)).granted
    assert first.offer.task == "alone"
    busy = replace(roomy, free_slots=2, running=(Held(first.offer.key, 1),))
    assert (await broker.synchronize(busy)).granted == ()
    await broker.complete("a", Held(first.offer.key, 1), replace_task(done(), "alone"))
    assert len((await broker.synchronize(roomy)).granted) == 2
    await broker.set_offers(EXPORT, [offer("n"), offer("o"), offer("late", exclusive=True)])
    assert (
        await broker.synchronize(
            replace(roomy, free_slots=1, running=(Held(offer("n").key, 1), Held(offer("o").key, 1)))
        )
    ).granted == ()


def replace_task(event: Event, task: str) -> Event:
    return event.model_copy(update={"task": task})


async def test_memory_comes_from_the_configuration_or_the_worker_times_the_factor(setup: Setup) -> None:
    broker = setup.broker()
    granted = await lease(broker, A, offer(memory_factor=0.5))
    assert granted.max_memory_bytes == 500
    granted = await lease(
        broker,
        B,
        replace(offer("n", memory_factor=0.5), call=StageCall("merge", {}, {}, Limits(max_memory_bytes=400))),
    )
    assert granted.max_memory_bytes == 200


async def test_offers_without_a_worker_are_known(setup: Setup) -> None:
    broker = setup.broker()
    await broker.set_offers(EXPORT, [offer()])
    setup.now += 5
    assert [o.task for o in broker.board.unserved_offers(longer_than=3)] == ["m"]
    await broker.synchronize(replace(A, free_slots=0))
    assert broker.board.unserved_offers(longer_than=3) == []
