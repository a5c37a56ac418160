"""Watchers of many exports: one reader for all of them, nothing lost or repeated, and no watcher delays another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slipway.errors import ServiceError
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage import changes as changes_module
from slipway_coordinator.storage.changes import BEGINNING, Position
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.workflow import feed as feed_module
from slipway_coordinator.workflow.feed import Feed, FeedEvent
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import tiny_export, tiny_task

T = TypeVar("T")


class Setup:
    """A database with its journal and a feed."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'state.db'}")
        self.database.prepare()
        self.reads = 0
        self.fails = False
        self.feed = Feed(self.database.changes, self.call)
        self.journal = Journal(self.database.transactions, on_commit=self.feed.note_stored)

    async def call(self, function: Callable[[], T]) -> T:
        self.reads += 1
        if self.fails:
            raise ServiceError("the database does not answer")
        return await asyncio.to_thread(function)

    async def insert(self, *names: str, project: str = "red") -> None:
        for name in names:
            await self.journal.commit(lambda name=name: self.database.insert(record(name, project)))  # type: ignore[misc]


def record(name: str, project: str = "red") -> ExportRecord:
    return tiny_export(name, tiny_task("m")).with_(name=f"projects/{project}/exports/{name}")


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Setup]:
    setup = Setup(folder)
    task = asyncio.create_task(setup.feed.run())
    try:
        yield setup
    finally:
        task.cancel()
        setup.journal.close()
        setup.database.close()


async def take(events: AsyncIterator[FeedEvent], count: int) -> list[FeedEvent]:
    async with asyncio.timeout(30):
        return [await anext(events) for _ in range(count)]


def names(events: list[FeedEvent]) -> list[str]:
    return [event.change.change.export.name.rpartition("/")[2] if event.change else "-" for event in events]


async def test_a_watcher_begins_with_now_and_sees_each_change_once(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        await setup.insert("before")
        async with aclosing(setup.feed.watch(None, projects=None)) as events:
            assert names(await take(events, 1)) == ["-"]
            await setup.insert("a", "b", "c")
            seen = await take(events, 3)
            assert names(seen) == ["a", "b", "c"]
            assert [event.position.sequence for event in seen] == [2, 3, 4]


@pytest.mark.parametrize(("in_memory", "size"), [(2, 1 << 20), (1000, 1 << 20), (1000, 2000), (1000, 0)])
async def test_whoever_continues_after_any_place_sees_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int, size: int
) -> None:
    monkeypatch.setattr(feed_module, "IN_MEMORY", in_memory)
    monkeypatch.setattr(feed_module, "IN_MEMORY_SIZE", size)
    monkeypatch.setattr(changes_module, "AT_ONCE", 1500)
    monkeypatch.setattr(feed_module, "_READ_AT_ONCE", 3)
    async with running(tmp_path) as setup, aclosing(setup.feed.watch(None, projects=None)) as first:
        await take(first, 1)
        for number in range(20):
            await setup.insert(f"x{number}", project="blue" if number % 3 == 0 else "red")
        whole = await take(first, 20)
        places = [BEGINNING, *(event.position for event in whole)]
        for number, place in enumerate(places[:-1]):
            await setup.feed.check(place)
            async with aclosing(setup.feed.watch(place, projects=None)) as events:
                again = await take(events, 1 + 20 - number)
            assert again[1:] == whole[number:]
            assert again[0] == FeedEvent(place)
        async with aclosing(setup.feed.watch(places[1], projects={"red"})) as events:
            red = await take(events, 14)
            assert names(red[1:]) == [f"x{number}" for number in range(20) if number % 3]
        assert sum(change.size for change in setup.feed._tail) == setup.feed._tail_size <= size


async def test_a_slow_watcher_delays_no_other_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "IN_MEMORY", 5)
    async with running(tmp_path) as setup:
        slow, quick = (setup.feed.watch(None, projects=None) for _ in range(2))
        async with aclosing(slow), aclosing(quick):
            await take(slow, 1)
            await take(quick, 1)
            await setup.insert(*(f"x{number}" for number in range(30)))
            assert len(await take(quick, 30)) == 30
            assert names(await take(slow, 30)) == [f"x{number}" for number in range(30)]


async def test_a_slow_watcher_holds_few_of_the_changes_in_memory(tmp_path: Path) -> None:
    labels = {f"l{number}": "x" * 2000 for number in range(64)}
    async with running(tmp_path) as setup, aclosing(setup.feed.watch(None, projects=None)) as slow:
        await take(slow, 1)
        for number in range(40):
            long = record(f"x{number}").with_(labels=labels)
            await setup.journal.commit(lambda long=long: setup.database.insert(long))  # type: ignore[misc]
        async with asyncio.timeout(30):
            while len(setup.feed._tail) < 40:
                await asyncio.sleep(0.01)
        assert setup.feed._tail_size > 4 << 20
        (watcher,) = setup.feed._watchers
        batch, reached = await setup.feed._since(BEGINNING, watcher)
        assert sum(change.size for change in batch) < (1 << 20) + 150_000
        assert reached == batch[-1].position
        assert names(await take(slow, 40)) == [f"x{number}" for number in range(40)]


async def test_a_watcher_whose_changes_were_forgotten_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "IN_MEMORY", 2)
    monkeypatch.setattr(changes_module, "CHANGES_KEPT", 5)
    monkeypatch.setattr(changes_module, "_FORGET_EVERY", 1)
    async with running(tmp_path) as setup, aclosing(setup.feed.watch(None, projects=None)) as slow:
        await take(slow, 1)
        await setup.insert(*(f"x{number}" for number in range(20)))
        with pytest.raises(ServiceError) as caught:
            await take(slow, 20)
        assert caught.value.reason == "CURSOR_EXPIRED"
        for place in (BEGINNING, Position(3, 1), Position(99, 1)):
            with pytest.raises(ServiceError) as caught:
                await setup.feed.check(place)
            assert caught.value.reason == "CURSOR_EXPIRED"


async def test_without_watchers_nothing_is_read_and_the_next_one_begins_with_now(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        async with aclosing(setup.feed.watch(None, projects=None)) as events:
            await take(events, 1)
        await asyncio.sleep(0.05)
        before = setup.reads
        await setup.insert("a", "b")
        await asyncio.sleep(0.05)
        assert setup.reads == before
        async with aclosing(setup.feed.watch(None, projects=None)) as events:
            (first,) = await take(events, 1)
            assert first.position.sequence == 2
            await setup.insert("c")
            assert names(await take(events, 1)) == ["c"]
        assert not setup.feed._watchers


async def test_a_silent_stream_has_bookmarks_even_if_much_happens_that_it_does_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_BOOKMARK_SECONDS", 0.2)
    async with running(tmp_path) as setup:
        stop = asyncio.Event()

        async def keep_busy() -> None:
            number = 0
            while not stop.is_set():
                await setup.insert(f"x{(number := number + 1)}", project="blue")
                await asyncio.sleep(0.01)

        busy = asyncio.create_task(keep_busy())
        hidden: Any = lambda export: export.name.endswith("never")  # noqa: E731
        async with aclosing(setup.feed.watch(None, projects=None, matches=hidden)) as events:
            marks = await take(events, 4)
        stop.set()
        await busy
        assert names(marks) == ["-"] * 4
        places = [mark.position.sequence for mark in marks]
        assert places == sorted(set(places)), "its cursor stays young"


async def test_only_who_asks_gets_progress_and_only_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_PROGRESS_SECONDS", 0.0)
    async with running(tmp_path) as setup:
        asks, other = (setup.feed.watch(None, projects={"red"}, progress=each) for each in (True, False))
        async with aclosing(asks), aclosing(other):
            await take(asks, 1)
            await take(other, 1)
            for done in range(100):
                for project, task in (("red", "m"), ("red", "q"), ("blue", "m")):
                    setup.feed.note_progress(record("x", project), export_pb2.TaskProgress(task=task, done=done))
            found = [event.advance for event in await take(asks, 2)]
            assert [(one.record.project, one.progress.task, one.progress.done) for one in found if one] == [
                ("red", "m", 99),
                ("red", "q", 99),
            ]
            await setup.insert("a")
            assert names(await take(other, 1)) == ["a"], "no progress before it"
            for number in range(feed_module._MOST_TASKS + 10):
                setup.feed.note_progress(record("x"), export_pb2.TaskProgress(task=f"t{number}"))
            (watcher,) = (each for each in setup.feed._watchers if each.progress)
            assert len(watcher.advances) == feed_module._MOST_TASKS


@pytest.mark.parametrize("deleted", [False, True])
async def test_no_progress_comes_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, deleted: bool
) -> None:
    monkeypatch.setattr(feed_module, "_BOOKMARK_SECONDS", 0.5)
    async with running(tmp_path) as setup:
        await setup.insert("a", "b")
        ended = record("a").with_(state=ExportState.CANCELLED, revision=2)
        if deleted:
            await setup.journal.commit(lambda: setup.database.save(ended))
        async with aclosing(setup.feed.watch(None, projects=None, progress=True)) as events:
            await take(events, 1)
            for name in "ab":
                setup.feed.note_progress(record(name), export_pb2.TaskProgress(task="m", done=1))
            change = (lambda: setup.database.delete(ended.name)) if deleted else (lambda: setup.database.save(ended))
            await setup.journal.commit(change)  # type: ignore[arg-type]
            await asyncio.sleep(0.3)
            end, other, mark = await take(events, 3)
        assert names([end]) == ["a"]
        assert other.advance is not None
        assert other.advance.record.name.endswith("/b")
        assert mark.advance is None


async def test_progress_that_is_not_shown_is_looked_at_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_BOOKMARK_SECONDS", 0.8)
    looked: list[str] = []

    def never(export: ExportRecord) -> bool:
        looked.append(export.name)
        return False

    async with (
        running(tmp_path) as setup,
        aclosing(setup.feed.watch(None, projects=None, matches=never, progress=True)) as events,
    ):
        await take(events, 1)
        mark = asyncio.create_task(take(events, 1))
        for done in range(50):
            setup.feed.note_progress(record("x"), export_pb2.TaskProgress(task="m", done=done))
            await asyncio.sleep(0.01)
        await mark
    assert len(looked) <= 3


async def test_while_changes_cannot_be_read_nobody_is_told_that_nothing_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(feed_module, "_BOOKMARK_SECONDS", 0.1)
    monkeypatch.setattr(feed_module, "_MOST_FAILURES", 20)
    async with running(tmp_path) as setup, aclosing(setup.feed.watch(None, projects=None)) as events:
        await take(events, 2)
        setup.fails = True
        await setup.insert("a")
        with pytest.raises(ServiceError) as caught:
            await take(events, 2)  # the first may be of before
        assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
        setup.fails = False
        async with asyncio.timeout(30):
            while setup.feed._failures:
                await asyncio.sleep(0.01)
        async with aclosing(setup.feed.watch(BEGINNING, projects=None)) as again:
            assert names(await take(again, 2)) == ["-", "a"]


async def test_a_database_that_is_away_for_a_while_costs_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_PAUSE_SECONDS", 0.05)
    async with running(tmp_path) as setup, aclosing(setup.feed.watch(None, projects=None)) as events:
        await take(events, 1)
        setup.fails = True
        await setup.insert("a")
        await asyncio.sleep(0.1)
        setup.fails = False
        assert names(await take(events, 1)) == ["a"]


async def test_a_deletion_shows_what_was_deleted(tmp_path: Path) -> None:
    async with running(tmp_path) as setup, aclosing(setup.feed.watch(None, projects=None)) as events:
        await take(events, 1)
        await setup.insert("a")
        ended = record("a").with_(state=ExportState.CANCELLED, revision=2, labels={"team": "speech"})
        await setup.journal.commit(lambda: setup.database.save(ended))
        await setup.journal.commit(lambda: setup.database.delete(ended.name))
        *_, last = await take(events, 3)
        assert last.change is not None
        assert (last.change.change.kind.value, last.change.change.export.labels) == ("deleted", {"team": "speech"})
