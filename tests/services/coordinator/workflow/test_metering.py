"""Artifacts are measured one after another, whatever one of them, the store or the database does; and gauges have what projects use."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa

from slipway.artifacts import Manifest, ManifestFile
from slipway.errors import ArtifactError, ServiceError
from slipway.observability import metrics
from slipway.security.access.projects import ProjectLimits, Projects
from slipway_coordinator.broker.board import Board
from slipway_coordinator.lifecycle.quotas import ProjectUsage, check_gpu_seconds
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.workflow import metering
from slipway_coordinator.workflow.metering import Meter
from slipway_coordinator.workflow.observation import Gauges

T = TypeVar("T")

FILE = ManifestFile("text", 2 << 20, "sha256:" + hashlib.sha256(b"text").hexdigest(), "")
MANIFEST = Manifest((FILE,))
ARTIFACTS = [f"sha256:{digit * 64}" for digit in "abcdef"]


class Store:
    """Gives every artifact the same manifest, or raises what a test says."""

    def __init__(self) -> None:
        self.faults: dict[str, Exception] = {}
        self.asked: list[str] = []

    def manifest(self, digest: str) -> Manifest:
        self.asked.append(digest)
        if digest in self.faults:
            raise self.faults[digest]
        return MANIFEST


async def in_thread(function: Callable[[], T]) -> T:
    return await asyncio.to_thread(function)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    database.prepare()
    for digest in ARTIFACTS:
        database.ownership.record_artifact("red", digest)
    yield database
    database.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(metering, "_REFRESH_SECONDS", 0.05)


def run(
    database: Database,
    store: Store,
    until: Callable[[Meter], bool],
    *,
    first: Callable[[], bool] = lambda: True,
    do: Callable[[], None] = lambda: None,
) -> None:
    """Let a meter run until something holds; ``do`` something in a transaction meanwhile, once ``first`` holds."""

    async def work() -> None:
        def note_commit() -> None:
            meter.note_stored()

        journal = Journal(database.transactions, on_commit=note_commit)
        meter = Meter(database, journal, store.manifest, call=in_thread)
        running = asyncio.create_task(meter.run())
        try:
            async with asyncio.timeout(30):
                while not first():
                    await asyncio.sleep(0.01)
                await journal.commit(do)
                while not until(meter):
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            journal.close()

    asyncio.run(work())


def left(database: Database) -> list[str]:
    return database.stored_bytes.unmeasured(limit=99)


UNAVAILABLE = ArtifactError("no answer", reason="STORE_UNAVAILABLE")


def test_one_artifact_that_cannot_be_read_holds_no_other_up(database: Database) -> None:
    store = Store()
    store.faults = {
        ARTIFACTS[0]: UNAVAILABLE,
        ARTIFACTS[1]: ArtifactError("gone", reason="ARTIFACT_NOT_FOUND"),
        ARTIFACTS[2]: ArtifactError("not one", reason="ARTIFACT_INVALID"),
    }
    run(database, store, lambda _: left(database) == ARTIFACTS[:1])
    run(database, store, lambda _: store.asked.count(ARTIFACTS[0]) > 3, do=store.asked.clear)
    assert set(store.asked) == {ARTIFACTS[0]}, "what is measured, or missing, is not read again"
    store.faults.clear()
    run(database, store, lambda meter: "red" in meter.usage and not meter.usage["red"].unmeasured_artifacts)
    assert database.stored_bytes.of("red") == FILE.size_bytes + 4 * len(MANIFEST.to_bytes())


def test_a_store_that_does_not_respond_is_asked_again_later(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    store.faults = dict.fromkeys(ARTIFACTS, UNAVAILABLE)
    run(database, store, lambda _: len(store.asked) >= 9)
    assert store.asked[:9] == [*ARTIFACTS, *ARTIFACTS[:3]], "each once in turn: it may be a fault of the first three"
    assert "cannot be measured now: no answer" in caplog.text
    assert "artifacts of projects cannot be measured now" in caplog.text
    store.faults = {
        ARTIFACTS[0]: RuntimeError("a fault of ours"),
        ARTIFACTS[1]: PermissionError(13, "no access"),
        ARTIFACTS[3]: OSError(5, "I/O error"),
    }
    run(database, store, lambda _: left(database) == [*ARTIFACTS[:2], ARTIFACTS[3]])
    assert "a fault of ours" in caplog.text
    store.faults.clear()
    run(database, store, lambda _: not left(database))  # another process


def test_one_artifact_that_cannot_be_recorded_holds_no_other_up(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = database.stored_bytes.record

    def broken(measured: Mapping[str, Mapping[str, int] | None]) -> None:
        if ARTIFACTS[0] in measured:
            raise sa.exc.DBAPIError("INSERT", {}, ValueError("a size that no column takes"))
        record(measured)

    monkeypatch.setattr(database.stored_bytes, "record", broken)
    run(database, Store(), lambda _: left(database) == ARTIFACTS[:1])
    assert f"{ARTIFACTS[0]} cannot be measured now" in caplog.text


def test_what_comes_is_measured_at_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "_PAUSE_SECONDS", 3600.0)
    run(database, Store(), lambda _: not left(database))
    waits = asyncio.Event.wait
    waiting: list[object] = []

    async def wait(event: asyncio.Event) -> bool:
        waiting.append(event)
        return await waits(event)

    monkeypatch.setattr(asyncio.Event, "wait", wait)
    new = f"sha256:{'9' * 64}"
    run(
        database,
        Store(),
        lambda _: new in database.ownership.find_owned("blue", [new]) and not left(database),
        first=lambda: bool(waiting),
        do=lambda: database.ownership.record_artifact("blue", new),
    )
    assert database.stored_bytes.of("blue") == FILE.size_bytes + len(MANIFEST.to_bytes())


def test_wrong_sums_are_computed_again_at_the_start(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    run(database, Store(), lambda _: not left(database))
    right = database.stored_bytes.of("red")
    with database.transactions.begin() as connection:
        connection.execute(sa.text("UPDATE slipway_usage SET stored_bytes = 5"))
    run(database, Store(), lambda _: database.stored_bytes.of("red") == right)
    assert f"the project red was said to store 5 bytes, its artifacts have {right}" in caplog.text


def test_looking_goes_on_after_a_fault(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[Exception] = [ServiceError("no answer", reason="COORDINATOR_UNAVAILABLE"), RuntimeError("ours")]
    usage = database.usage
    monkeypatch.setattr(database, "usage", lambda: usage() if not faults else (_ for _ in ()).throw(faults.pop()))
    run(database, Store(), lambda meter: bool(meter.usage))
    assert faults == []


def test_gauges_have_what_projects_use_by_their_names_in_metrics() -> None:
    projects = Projects({"red": ProjectLimits(), "blue": ProjectLimits()})
    board = Board(10.0, lambda: 0.0, lambda: projects)
    usage = {"red": ProjectUsage(5, 0, 1.5), "x": ProjectUsage(7, 1, 0.25), "y": ProjectUsage(1, 0, 0.5)}
    gauges = Gauges(board, active=lambda: True, usage=lambda: usage)

    def shown(metric: metrics.Gauge) -> dict[str, float]:
        return {labels["project"]: value for one, labels, value in gauges() if one is metric}

    assert shown(metrics.PROJECT_STORED_BYTES) == {"red": 5, "other": 8}
    assert shown(metrics.PROJECT_UNMEASURED_ARTIFACTS) == {"red": 0, "other": 1}
    assert shown(metrics.PROJECT_GPU_SECONDS) == {"red": 1.5, "other": 0.75}
    usage.clear()
    assert shown(metrics.PROJECT_STORED_BYTES) == {"red": 0, "other": 0}, "one that was seen stays"


@pytest.mark.parametrize(
    ("days", "most", "first"),
    [
        ({100: 50.0}, 50, "1970-05-11"),
        ({100: 50.0, 101: 1.0}, 50, "1970-05-11"),
        ({100: 1.0, 101: 50.0}, 50, "1970-05-12"),
        ({100: 10.0, 101: 10.0, 105: 10.0}, 15, "1970-05-12"),
        ({100: 10.0, 101: 10.0, 105: 10.0}, 5, "1970-05-16"),
    ],
)
def test_a_refusal_names_the_first_day_with_something_left(days: dict[int, float], most: int, first: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check_gpu_seconds("red", ProjectLimits(gpu_seconds=most), days)
    assert f"try again on {first} (UTC)" in str(caught.value)
    with pytest.raises(ServiceError) as caught:
        check_gpu_seconds("red", ProjectLimits(gpu_seconds=0), days)
    assert "try again" not in str(caught.value)
    check_gpu_seconds("red", ProjectLimits(gpu_seconds=10_000), days)
    check_gpu_seconds("red", ProjectLimits(), days)
