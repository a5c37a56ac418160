"""Clients that go away in the middle of a call: what they asked for is done whole, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import ServiceError
from slipway_coordinator.workflow.periodic import forget_old
from support.coordinators.harness import Harness, state, tiny_export, tiny_task, wait_for


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("departures")) as harness:
        yield harness


@contextmanager
def busy(harness: Harness) -> Iterator[None]:
    """The database takes no changes until the block ends."""
    with closing(sqlite3.connect(harness.home / "state.db", isolation_level=None, timeout=60)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def abandon(harness: Harness, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Begin a call while the database is busy, and cancel it, as the server does when its client is gone."""

    async def story() -> None:
        call = asyncio.ensure_future(make())
        await asyncio.sleep(0.1)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with busy(harness):
        harness.run(story)


def test_an_export_whose_creator_went_away_is_carried_out(harness: Harness) -> None:
    record = tiny_export("created", tiny_task("m"), base=harness.base())
    coordinator = harness.server.coordinator
    abandon(harness, lambda: coordinator.create(record))
    wait_for(lambda: harness.run(lambda: coordinator.load(record.name)))
    assert state(harness.finished(record.name)) == "succeeded"


def test_a_retry_whose_client_went_away_is_carried_out(harness: Harness, tmp_path: Path) -> None:
    task = tiny_task("m", fail="CONFIGURATION_INVALID", fail_times=1, runs=str(tmp_path / "runs"))
    name = harness.submit(tiny_export("retried", task, base=harness.base(), recovery={"max_attempts": 1}))
    assert state(harness.finished(name)) == "failed"
    coordinator = harness.server.coordinator
    record = harness.run(lambda: coordinator.load(name))
    abandon(harness, lambda: coordinator.retry(record))
    wait_for(lambda: state(harness.client.get_export(name)) == "succeeded")


def test_a_cancellation_whose_client_went_away_takes_effect(harness: Harness) -> None:
    name = harness.submit(tiny_export("cancelled", tiny_task("m", sleep_seconds=60), base=harness.base()))
    wait_for(lambda: state(harness.client.get_export(name)) == "running")
    coordinator = harness.server.coordinator
    record = harness.run(lambda: coordinator.load(name))
    abandon(harness, lambda: coordinator.cancel(record))
    wait_for(lambda: state(harness.client.get_export(name)) == "cancelled")


def test_retries_at_once_are_one_retry(harness: Harness, tmp_path: Path) -> None:
    task = tiny_task("m", fail="CONFIGURATION_INVALID", fail_times=1, runs=str(tmp_path / "runs"))
    name = harness.submit(tiny_export("twice", task, base=harness.base()))
    assert state(harness.finished(name)) == "failed"
    coordinator = harness.server.coordinator
    record = harness.run(lambda: coordinator.load(name))
    threads = [threading.Thread(target=harness.run, args=(lambda: coordinator.retry(record),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: state(harness.client.get_export(name)) == "succeeded")
    assert len((tmp_path / "runs").read_text().split()) == 2


def test_what_was_deleted_meanwhile_is_not_retried(harness: Harness) -> None:
    task = tiny_task("m", fail="CONFIGURATION_INVALID")
    name = harness.submit(tiny_export("deleted", task, base=harness.base()))
    assert state(harness.finished(name)) == "failed"
    coordinator = harness.server.coordinator
    record = harness.run(lambda: coordinator.load(name))
    harness.run(lambda: coordinator.delete(record))
    with pytest.raises(ServiceError) as caught:
        harness.run(lambda: coordinator.retry(record))
    assert caught.value.reason == "EXPORT_STATE"
    assert harness.run(lambda: coordinator.load(name)) is None


@pytest.mark.parametrize("forget", ["a client", "the history"])
def test_what_was_run_again_meanwhile_is_not_deleted(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: str
) -> None:
    """Whoever deletes it saw it ended; it runs by the time its turn comes."""
    go_on = tmp_path / "go on"
    task = tiny_task(
        "m",
        fail="CONFIGURATION_INVALID",
        fail_times=1,
        runs=str(tmp_path / "runs"),
        sleep_seconds=600,
        unless=str(go_on),
    )
    go_on.touch()
    name = harness.submit(
        tiny_export("again-" + forget.replace(" ", "-"), task, base=harness.base(), recovery={"max_attempts": 1})
    )
    assert state(harness.finished(name)) == "failed"
    go_on.unlink()
    coordinator = harness.server.coordinator
    seen = harness.run(lambda: coordinator.load(name))
    harness.run(lambda: coordinator.retry(seen))
    if forget == "a client":
        with pytest.raises(ServiceError) as caught:
            harness.run(lambda: coordinator.delete(seen))
        assert caught.value.reason == "EXPORT_STATE"
    else:
        looks = iter([[seen], []])  # what the history read just before it was run again
        monkeypatch.setattr(coordinator.database, "find_ended_before", lambda *_, **__: next(looks))
        assert harness.run(lambda: forget_old(coordinator, days=0)) == 0
    go_on.touch()
    assert state(harness.finished(name)) == "succeeded"
