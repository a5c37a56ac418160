"""Attempts go to workers that hold their inputs: for a short time, in turn, and whatever a worker says of itself."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.digests import abridged
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.errors import ServiceError
from slipway.requirements import Needs, Requirements
from slipway.rpc.messages import MOST_HELD
from slipway.security.access.projects import ALIKE
from slipway.stage_call import StageCall
from slipway_coordinator.api.worker_service import worker_report
from slipway_coordinator.broker.board import Board
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.broker.locality import LEAST_BYTES, LONGEST_SECONDS, LOOK_AHEAD
from slipway_coordinator.lifecycle.offers import Answer, Held, Offer, WorkerReport
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.storage.leases import Ledger
from slipway_protos.v1 import worker_pb2
from support.coordinators.harness import tiny_export, tiny_task

BASE, OTHER = (f"sha256:{hashlib.sha256(name).hexdigest()}" for name in (b"base", b"other"))
LARGE = 10 * LEAST_BYTES


class Site:
    """A board with workers of one slot each, and offers whose inputs have been measured."""

    def __init__(self, **held: tuple[str, ...] | None) -> None:
        self.now = 0.0
        self.board = Board(1e9, lambda: self.now, lambda: ALIKE)
        self.reports: dict[str, WorkerReport] = {}
        for name, digests in held.items():
            self.report(name, held=None if digests is None else frozenset(map(abridged, digests)))

    def report(self, name: str, **more: Any) -> None:
        """Let a worker report."""
        self.reports[name] = WorkerReport(name, frozenset({"x"}), slots=1, free_slots=1, **more)
        self.board.record_report(self.reports[name])

    def offer(self, name: str, *inputs: str, size: int = LARGE, project: str = "p", **more: Any) -> Offer:
        """Offer a task of this name that fetches these inputs."""
        call = StageCall("x", {}, {f"i{number}": digest for number, digest in enumerate(inputs)})
        offered = Offer(f"projects/{project}/exports/e", name, 1, call, **more)
        self.board.offer(offered)
        self.board.locality.note_sizes(offered.key, dict.fromkeys(inputs, size))
        return offered

    def asks(self, name: str, *, free: int = 1) -> list[str]:
        """Return the tasks that a worker gets now."""
        return [chosen.task for chosen in self.board.choose(self.reports[name], free=free, busy=0)]


def test_a_task_is_left_to_the_free_worker_that_holds_its_inputs() -> None:
    site = Site(empty=(), holder=(BASE,))
    site.offer("t", BASE)
    assert site.asks("empty") == []
    assert site.asks("holder") == ["t"]


def test_who_holds_most_bytes_goes_first() -> None:
    site = Site(one=(BASE,), both=(BASE, OTHER), empty=())
    site.offer("t", BASE, OTHER)
    assert [site.asks(name) for name in ("empty", "one", "both")] == [[], [], ["t"]]


def test_no_task_waits_longer_than_the_bound() -> None:
    site = Site(empty=(), holder=(BASE,))
    site.offer("t", BASE)
    assert site.asks("empty") == []
    site.now = LONGEST_SECONDS - 0.1
    assert site.asks("empty") == []
    site.now = LONGEST_SECONDS
    assert site.asks("empty") == ["t"]


@pytest.mark.parametrize("unable", ["running", "draining", "silent", "unfit", "avoided", "small"])
def test_nothing_is_left_to_a_worker_that_does_not_help(unable: str) -> None:
    site = Site(empty=(), holder=(BASE,))
    more: dict[str, Any] = {}
    match unable:
        case "running":
            site.offer("before", BASE)
            assert site.asks("holder") == ["before"]
        case "draining":
            site.report("holder", draining=True)
        case "silent":
            site.board.ttl = 1.0
            site.now = 3.0
            site.report("empty")
            site.board.forget_silent()
        case "unfit":
            site.report("empty", gpu_architecture="sm90")
            more = {"requirements": Requirements(any_of=(Needs(gpu=True),))}
        case "avoided":
            more = {"avoid": ("holder",)}
    site.offer("t", BASE, size=LEAST_BYTES - 1 if unable == "small" else LARGE, **more)
    assert site.asks("empty") == ["t"]


def test_workers_that_say_nothing_get_tasks_as_before() -> None:
    site = Site(old=None, older=None)
    for name in "ab":
        site.offer(name, BASE)
    assert [site.asks("old"), site.asks("older")] == [["a"], ["b"]]
    mixed = Site(old=None, new=(BASE,))
    mixed.offer("t", BASE)
    assert mixed.asks("old") == []
    assert mixed.asks("new") == ["t"]


def test_a_worker_takes_the_task_of_which_it_has_most_and_overtakes_for_the_bound_only() -> None:
    site = Site(holder=(BASE,))
    for name in ("a", "b", "c"):
        site.offer(name, BASE if name == "b" else OTHER)
    site.offer("d", BASE)
    assert site.asks("holder") == ["b"]
    site.now = LONGEST_SECONDS
    assert site.asks("holder") == ["a"]  # since it was overtaken
    assert site.asks("holder") == ["c"]  # by now it has this input too


def test_priority_goes_before_inputs() -> None:
    site = Site(holder=(BASE,))
    site.offer("near", BASE)
    site.offer("urgent", OTHER, priority=5)
    assert site.asks("holder") == ["urgent"]


def test_what_a_worker_got_or_made_counts_before_it_reports_it() -> None:
    site = Site(first=(), second=())
    site.offer("t", BASE)
    assert site.asks("first") == ["t"]
    (key,) = site.board.held
    del site.board.held[key]
    site.board.locality.note_made("first", [OTHER])
    site.offer("u", BASE)
    site.offer("v", OTHER)
    assert site.asks("second") == ["v"]  # one is left to each other worker
    assert site.asks("first") == ["u"]


def test_who_fetched_only_small_files_holds_nothing() -> None:
    """As the task that joins parts, which adopts their weights."""
    site = Site(joiner=(), other=())
    joining = site.offer("join", BASE, size=10)
    site.board.locality.note_sizes(joining.key, {BASE: 10}, partial=True)
    assert site.asks("joiner") == ["join"]
    del site.board.held[joining.key]
    site.offer("t", BASE)
    assert site.asks("other") == ["t"]


def test_one_task_is_left_to_each_worker_and_the_others_start() -> None:
    site = Site(empty=(), other=(), holder=(BASE,))
    for name in "abc":
        site.offer(name, BASE)
    assert site.asks("empty") == ["b"]
    assert site.asks("holder") == ["a"]
    assert site.asks("other") == ["c"]


def test_no_worker_stands_idle_before_a_queue() -> None:
    site = Site(empty=(), **{f"w{number}": (BASE,) for number in range(20)})
    for number in range(30):
        site.offer(f"t{number:02}", BASE)
    assert site.asks("empty") == ["t08"]


def test_what_was_not_reported_after_all_is_not_held() -> None:
    site = Site(first=(), second=(), third=())
    site.board.locality.note_made("first", [BASE])
    site.offer("t", BASE)
    assert site.asks("second") == []
    site.now = 31.0  # it was evicted before the next report
    site.board.forget_silent()
    site.board.withdraw(next(iter(site.board.waiting)))
    site.offer("u", BASE)
    assert site.asks("third") == ["u"]


def test_a_hostile_worker_that_claims_everything_costs_the_bound_and_no_more() -> None:
    site = Site(honest=(), liar=(BASE, OTHER))
    for number in range(20):
        site.offer(f"t{number:02}", BASE)
    got = []
    for _ in range(200):
        got += site.asks("honest")
        for key in list(site.board.held):
            del site.board.held[key]
        site.now += 0.1
    assert sorted(got) == [f"t{number:02}" for number in range(20)]
    assert site.now < 21


@pytest.mark.parametrize("numbers", [range(MOST_HELD + 1), [7] * (MOST_HELD + 1)], ids=["many", "the same"])
def test_a_summary_that_is_too_long_is_refused(numbers: Any) -> None:
    request = worker_pb2.SynchronizeRequest(
        worker_id="w", stages=["x"], held=worker_pb2.HeldArtifacts(artifacts=numbers)
    )
    with pytest.raises(ServiceError, match=r"held\.artifacts has 2049 entries") as caught:
        worker_report("w", request)
    assert caught.value.reason == "LIMIT_EXCEEDED"


def test_what_is_not_said_stays_and_nothing_is_something_that_can_be_said() -> None:
    request = worker_pb2.SynchronizeRequest(worker_id="w", stages=["x"])
    assert worker_report("w", request).held is None
    request.held.SetInParent()
    assert worker_report("w", request).held == frozenset()
    request.held.artifacts.extend([1, 2**64 - 1, 1])
    assert worker_report("w", request).held == frozenset({1, 2**64 - 1})
    site = Site(empty=(), holder=(BASE,))
    site.report("holder")  # nothing new
    site.offer("t", BASE)
    assert site.asks("empty") == []
    site.report("holder", held=frozenset())
    assert site.asks("empty") == ["t"]


def test_projects_take_turns_as_without() -> None:
    """One project has all inputs at a worker, another none; both get half of the slots."""
    rng = random.Random(4)
    site = Site(a=(BASE,), b=(BASE,), c=())
    for number in range(200):
        site.offer(f"n{number}", BASE, project="near")
        site.offer(f"f{number}", OTHER, project="far")
    got: list[str] = []
    while len(got) < 200:
        got += site.asks(rng.choice("abc"))
        site.now += 0.2
        while len(site.board.held) > 2:
            del site.board.held[next(iter(site.board.held))]
    assert 80 < sum(task.startswith("n") for task in got) < 120


def test_a_long_queue_is_looked_at_only_in_front() -> None:
    site = Site(holder=(BASE,))
    for number in range(LOOK_AHEAD + 1):
        site.offer(f"t{number:02}", BASE if number == LOOK_AHEAD else OTHER)
    assert site.asks("holder") == ["t00"]


def test_what_is_gone_is_forgotten() -> None:
    site = Site(empty=(), holder=(BASE,))
    kept = site.offer("t", BASE)
    assert site.asks("empty") == []
    site.board.withdraw(kept.key)
    site.board.ttl = 1.0
    site.now = 3.0
    site.board.forget_silent()
    locality = site.board.locality
    assert not locality.matters
    assert not locality.is_overdue(kept.key)
    assert not locality.is_measured(kept.key)


class Store:
    """Manifests of artifacts of one file; it may stop answering."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.answers = threading.Event()
        self.broken = False

    def manifest(self, digest: str) -> Manifest:
        """Return an artifact's manifest."""
        self.reads.append(digest)
        self.answers.wait(30)
        if self.broken:
            raise ValueError("no manifest")
        return Manifest.of([ManifestFile("weights", LARGE, BASE, "application/octet-stream")])


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store()
    opened.answers.set()
    yield opened
    opened.answers.set()


@pytest.fixture
def broker(tmp_path: Path, store: Store) -> Iterator[Broker]:
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    database.prepare()
    database.insert(tiny_export("x", tiny_task("t"), tiny_task("u")).with_(name=EXPORT))
    journal = Journal(database.transactions)
    ledger = Ledger(database.leases, database.events)
    yield Broker(ledger, journal, deliver=lambda _: None, manifests=store.manifest)
    journal.close()
    database.close()


EXPORT = "projects/p/exports/x"
EMPTY = WorkerReport("empty", frozenset({"merge"}), slots=1, free_slots=1, held=frozenset())
HOLDER = replace(EMPTY, worker="holder", held=frozenset({abridged(BASE)}))


def task(name: str, *inputs: str) -> Offer:
    return Offer(EXPORT, name, 1, StageCall("merge", {}, {f"i{at}": digest for at, digest in enumerate(inputs)}))


async def parked(broker: Broker, report: WorkerReport) -> asyncio.Task[Answer]:
    """Let a worker ask and wait."""
    asking = asyncio.create_task(broker.synchronize(report, wait_seconds=30.0))
    while report.worker not in broker.board.workers:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    return asking


async def test_of_two_that_wait_the_holder_gets_the_task(broker: Broker, store: Store) -> None:
    empty, holder = await parked(broker, EMPTY), await parked(broker, HOLDER)
    await broker.set_offers(EXPORT, [task("t", BASE)])
    (granted,) = (await holder).granted
    assert granted.offer.task == "t"
    assert not empty.done()
    await broker.set_offers(EXPORT, [task("t", BASE), task("u", BASE)])
    (granted,) = (await empty).granted  # the holder is busy now
    assert granted.offer.task == "u"
    assert store.reads == [BASE]


async def test_what_was_made_goes_on_at_its_maker(broker: Broker) -> None:
    await broker.set_offers(EXPORT, [task("t")])
    (granted,) = (await broker.synchronize(EMPTY)).granted
    other = await parked(broker, replace(EMPTY, worker="other"))
    held = Held(granted.offer.key, granted.epoch)
    event = Event(kind=EventKind.SUCCEEDED, time=0.0, task="t", attempt=1, outputs={"model": OTHER})
    await broker.complete("empty", held, event)
    await broker.set_offers(EXPORT, [task("u", OTHER)])
    (granted,) = (await broker.synchronize(replace(EMPTY, held=None))).granted
    assert granted.offer.task == "u"
    assert not other.done()
    other.cancel()


async def test_a_store_that_does_not_answer_delays_no_task(broker: Broker, store: Store) -> None:
    store.answers.clear()
    empty = await parked(broker, EMPTY)
    await broker.set_offers(EXPORT, [task("t", BASE)])
    await broker.set_offers(EXPORT, [task("t", BASE), task("u", OTHER)])
    assert [granted.offer.task for granted in (await empty).granted] == ["t"]
    assert not store.answers.is_set()
    assert store.reads == [BASE]  # it is left alone for a while
    store.answers.set()


async def test_a_fault_while_measuring_ends_nothing(
    broker: Broker, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.broken = True
    await broker.synchronize(replace(HOLDER, free_slots=0))
    await broker.set_offers(EXPORT, [task("t", BASE)])
    await broker.expire()
    assert [granted.offer.task for granted in (await broker.synchronize(EMPTY)).granted] == ["t"]
    assert caplog.text.count("cannot be measured") == 1


async def test_nothing_is_measured_for_workers_that_say_nothing(broker: Broker, store: Store) -> None:
    await broker.synchronize(replace(EMPTY, free_slots=0, held=None))
    await broker.set_offers(EXPORT, [task("t", BASE)])
    assert store.reads == []
    await broker.synchronize(replace(HOLDER, free_slots=0))
    await broker.expire()  # offers from before are measured later
    assert store.reads == [BASE]
