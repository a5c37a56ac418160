"""Deliveries in the transactions of changes, in SQLite and a real PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage import schema
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import state_at
from slipway_coordinator.storage.deliveries import BATCH, Delivery, Waiting
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.webhooks.announcer import WebhookAnnouncer
from slipway_coordinator.webhooks.receivers import load_webhooks
from support.coordinators.harness import tiny_export, tiny_task
from support.servers.postgres_server import PostgresServer, postgres_server
from support.servers.webhook_receiver import webhooks_file

E = ExportState
RECEIVERS = [{"name": name, "url": "https://a.example", "secret_file": "secret"} for name in ("one", "two")]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path, server: PostgresServer) -> Iterator[Database]:
    shared = request.param == "postgres"
    place = server.create(f"d{time.monotonic_ns()}") if shared else str(tmp_path / "state.db")
    webhooks = load_webhooks(webhooks_file(tmp_path / "webhooks", *RECEIVERS))
    database = Database(state_at(place).url, announcer=WebhookAnnouncer(lambda: webhooks))
    database.migrate()
    database.prepare()
    yield database
    database.close()


def export(name: str = "x") -> ExportRecord:
    return tiny_export(name, tiny_task("m"))


def due(database: Database, receiver: str = "one", *, most: int = 100, after: float = 0.0) -> list[Delivery]:
    return database.deliveries.find_due(receiver, now=time.time() + after, most=most)


def take_all(database: Database, receiver: str = "one") -> list[str]:
    """Take one after the other, and return their types."""
    taken = []
    while found := due(database, receiver, most=1):
        taken.append(found[0].type.removeprefix("export."))
        database.deliveries.remove(receiver, found[0].id)
    return taken


def change(database: Database, record: ExportRecord, *states: ExportState) -> ExportRecord:
    for state in states:
        run = record.run + (state is E.QUEUED)
        record = record.with_(state=state, run=run, revision=record.revision + 1)
        assert database.save(record)
    return record


def test_a_change_and_its_deliveries_are_stored_together(database: Database) -> None:
    record = export()
    assert database.insert(record)
    assert not database.insert(record)
    record = change(database, record, E.RUNNING, E.RUNNING, E.CANCELLING, E.CANCELLED, E.QUEUED, E.RUNNING, E.FAILED)
    assert database.save(record)  # harmless to repeat
    assert not database.save(record.with_(revision=2, state=E.SUCCEEDED)), "an older revision tells nothing"
    database.delete(record.name)
    database.delete(record.name)
    for receiver in ("one", "two"):
        first = due(database, receiver)
        assert [(one.type, one.export, one.attempts) for one in first] == [("export.created", record.name, 0)]
    told = ["created", "started", "cancelling", "cancelled", "retried", "started", "failed", "deleted"]
    assert take_all(database) == told
    assert take_all(database, "two") == told
    assert database.deliveries.count_waiting() == {}


def test_what_is_rolled_back_is_not_told(database: Database) -> None:
    record = export()
    assert database.insert(record)
    take_all(database)

    def fail() -> None:
        with database.transactions.begin():
            change(database, record, E.RUNNING, E.SUCCEEDED)
            assert database.insert(export("y"))
            database.delete(record.name)
            assert len(due(database)) == 2
            raise RuntimeError("before the commit")

    with pytest.raises(RuntimeError, match="before"):
        fail()
    assert due(database) == []
    assert database.get(record.name) == record
    change(database, record, E.RUNNING)
    assert take_all(database) == ["started"]


async def test_a_change_that_fails_tells_nothing_though_others_of_its_group_do(database: Database) -> None:
    journal = Journal(database.transactions)

    def fails() -> None:
        assert database.insert(export("bad"))
        raise RuntimeError("of this change alone")

    changes = [journal.commit(lambda: database.insert(export("good"))), journal.commit(fails)]
    good, bad = await asyncio.gather(*changes, return_exceptions=True)
    journal.close()
    assert good is True
    assert isinstance(bad, RuntimeError)
    assert [one.export[-4:] for one in due(database)] == ["good"]


def test_an_event_that_cannot_be_made_keeps_no_export_from_going_on(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def tell_change(self, before: ExportState | None, after: ExportRecord) -> Sequence[Delivery]:
            raise ValueError("no event")

        def tell_deletion(self, record: ExportRecord) -> Sequence[Delivery]:
            raise ValueError("no event")

    database.deliveries._announcer = Broken()
    record = export()
    assert database.insert(record)
    record = change(database, record, E.RUNNING, E.FAILED)
    assert database.get(record.name) == record
    database.delete(record.name)
    assert database.get(record.name) is None
    assert due(database) == []
    assert caplog.text.count("no event can be made for a change of") == 4


def test_a_deletion_is_told_after_everything_else_and_before_another_export_of_the_name(database: Database) -> None:
    record = export()
    assert database.insert(record)
    database.delete(record.name)
    assert database.insert(record.with_(create_time=record.create_time + 1))
    assert take_all(database) == ["created", "deleted", "created"]


def test_a_delivery_that_waits_holds_up_its_export_alone(database: Database) -> None:
    for name in ("a", "b", "c"):
        assert database.insert(export(name))
    change(database, export("a"), E.RUNNING)
    table = database.deliveries
    first = due(database, most=2)
    assert [one.export[-1] for one in first] == ["a", "b"]
    table.postpone("one", first[0].id, until=time.time() + 100)
    assert [one.export[-1] for one in due(database)] == ["b", "c"]
    assert len(due(database, "two")) == 3, "the other receiver has its own"
    late = due(database, after=101)
    assert {one.export[-1]: one.attempts for one in late} == {"a": 1, "b": 0, "c": 0}
    assert [one.export[-1] for one in late] == ["b", "c", "a"]
    (least,) = table.find_due("one", now=time.time() + 101, most=1, least_tried=True)
    assert least.export[-1] == "b"
    for one in due(database):
        table.postpone("one", one.id, until=time.time() + (10 if one.export[-1] == "c" else 20))
    table.postpone("one", first[0].id, until=0.0)
    assert [one.export[-1] for one in due(database, after=21)] == ["a", "c", "b"], "the longest due goes first"
    again = table.find_due("one", now=time.time() + 21, most=3, least_tried=True)
    assert [one.export[-1] for one in again] == ["c", "b", "a"]
    assert table.hasten("one", now=time.time(), most_tried=3) == 2
    assert sorted(one.export[-1] for one in due(database)) == ["a", "b", "c"]
    assert sorted(take_all(database)) == ["created", "created", "created", "started"]


def test_what_was_never_tried_is_not_given_up(database: Database) -> None:
    for name in ("a", "b"):
        assert database.insert(export(name))
    table, later = database.deliveries, time.time() + 1
    assert table.give_up("one", before=later) == []
    (first, _) = due(database)
    table.postpone("one", first.id, until=0.0)
    assert table.give_up("one", before=first.create_time - 1) == []
    assert table.give_up("one", before=first.create_time - 1, untried=True) == []
    assert table.give_up("one", before=later, spare=[first.id]) == [], "it is under way"
    (lost,) = table.give_up("one", before=later)
    assert (lost.id, lost.type, lost.export, lost.attempts) == (first.id, "export.created", first.export, 1)
    assert {name: waiting.number for name, waiting in table.count_waiting().items()} == {"one": 1, "two": 2}
    assert len(table.give_up("one", before=later, untried=True)) == 1
    assert {one.receiver for one in table.give_up("two", untried=True, most=1)} == {"two"}
    assert table.count_waiting()["two"].number == 1


def test_after_an_event_is_given_up_the_next_one_of_its_export_is_due(database: Database) -> None:
    assert database.insert(export())
    change(database, export(), E.RUNNING, E.FAILED)
    table = database.deliveries
    (first,) = due(database)
    table.postpone("one", first.id, until=0.0)
    assert [one.type for one in table.give_up("one", before=time.time() + 1)] == ["export.created"]
    assert take_all(database) == ["started", "failed"]
    gone = table.give_up("two", untried=True, most=2)  # in any order
    assert sorted(one.type for one in gone) == ["export.created", "export.started"]
    assert take_all(database, "two") == ["failed"]


def test_what_is_hastened_goes_oldest_first_and_what_is_refused_keeps_its_pause(database: Database) -> None:
    table = database.deliveries
    for name in ("a", "b", "c"):
        assert database.insert(export(name))
    for one in due(database):
        for _ in range({"a": 1, "b": 4, "c": 3}[one.export[-1]]):
            table.postpone("one", one.id, until=time.time() + 100)
    assert due(database) == []
    assert table.hasten("one", now=time.time(), most_tried=3) == 2
    assert [one.export[-1] for one in due(database)] == ["a", "c"]
    assert [one.export[-1] for one in due(database, after=101)] == ["a", "c", "b"]
    assert table.hasten("one", now=time.time(), most_tried=3) == 0


def test_a_clock_that_was_set_back_holds_nothing_up(database: Database) -> None:
    for name in ("a", "b", "c"):
        assert database.insert(export(name))
    first, second, _ = due(database)
    database.deliveries.postpone("one", first.id, until=time.time() + 900)
    database.deliveries.postpone("one", second.id, until=time.time() + 10)
    assert [one.export[-1] for one in due(database)] == ["c"]
    assert {one.export[-1] for one in due(database, after=-90_000)} == {"a", "b", "c"}
    assert database.deliveries.hasten("one", now=time.time() - 90_000, most_tried=3) == 3
    assert len(due(database, after=-90_000)) == 3


def test_what_waits_is_counted(database: Database) -> None:
    before = time.time()
    for name in ("a", "b"):
        assert database.insert(export(name))
    waiting = database.deliveries.count_waiting()
    assert set(waiting) == {"one", "two"}
    assert isinstance(waiting["one"], Waiting)
    assert waiting["one"].number == 2
    assert before <= waiting["one"].oldest <= time.time()


def test_without_receivers_nothing_is_stored(database: Database) -> None:
    database.deliveries._announcer = None
    record = export()
    assert database.insert(record)
    change(database, record, E.RUNNING, E.FAILED)
    database.delete(record.name)
    with database._engine.connect() as connection:
        assert connection.execute(sa.text("SELECT COUNT(*) FROM slipway_deliveries")).scalar() == 0


@pytest.mark.slow
def test_a_hundred_thousand_deliveries_are_looked_through_quickly(database: Database) -> None:
    """A receiver that is down for long has many: of each export one that was tried, and those that wait for it."""
    now = time.time()
    rows = [
        {
            "receiver": receiver,
            "id": f"{number}-{revision}",
            "type": "export.created",
            "export": f"projects/default/exports/e{number}",
            "export_create_time": now,
            "revision": revision,
            "create_time": now - (number % 100),
            "attempts": 2 if revision == 1 else 0,
            "due_time": now + 10 if revision == 1 and number >= 100 else now - 10,
            "is_next": revision == 1,
            "body": "x" * 1000,
        }
        for receiver in ("one", "two")
        for number in range(12_500)
        for revision in (1, 2, 3, 4)
    ]
    with database._engine.begin() as connection:
        connection.execute(sa.insert(schema.deliveries), rows)
    table = database.deliveries

    def took(function: Callable[[], Any]) -> float:
        began = time.perf_counter()
        function()
        seconds = time.perf_counter() - began
        print(f"{seconds * 1000:.1f} ms")
        return seconds

    for least_tried in (False, True):
        find = partial(table.find_due, "one", now=now, most=4, least_tried=least_tried)
        assert [one.revision for one in find()] == [1] * 4
        assert min(took(find) for _ in range(5)) < 0.05
    give_up = partial(table.give_up, "one", before=now - 50, spare=["0-1"])
    assert len(give_up()) == BATCH
    assert min(took(give_up) for _ in range(5)) < 0.5
    nothing = partial(table.give_up, "one", before=now - 1000, untried=True)
    assert min(took(nothing) for _ in range(5)) < 0.05
    assert min(took(table.count_waiting) for _ in range(5)) < 0.5
    assert table.hasten("one", now=now, most_tried=3) == BATCH
