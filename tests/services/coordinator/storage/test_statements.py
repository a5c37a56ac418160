"""How many statements the database runs for an export and for a task: each costs about as much as all else that they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from slipway.planning.references import AttemptKey
from slipway.stage_call import StageCall
from slipway_coordinator.lifecycle.offers import Held, Offer
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskState
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.leases import Ledger
from support.coordinators.harness import DIGEST, tiny_export, tiny_task

MADE = "sha256:" + "1" * 64


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def state_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(database: Database) -> Database:
    """A state whose project has measured the base of all exports."""
    assert database.insert(tiny_export("first", tiny_task("m")))
    database.stored_bytes.record({DIGEST: {DIGEST: 10}})
    return database


@contextmanager
def at_most(number: int, database: Database) -> Iterator[None]:
    """Fail if the block runs more statements; the lock of the numbers of changes, which SQLite does not need, is left out."""
    statements = list[str]()

    def note(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        if "pg_advisory_xact_lock" not in statement:
            statements.append(" ".join(statement.split()))

    sa.event.listen(database._engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        sa.event.remove(database._engine, "before_cursor_execute", note)
    assert len(statements) <= number, "\n".join(statements)


def carry_out(database: Database, record: ExportRecord, *, number: int) -> None:
    """Carry out an export of one task, with a number of statements at most."""
    ledger = Ledger(database.leases, database.events)
    key = AttemptKey.of(record.name, "m", 1)
    with at_most(number, database), database.transactions.begin():
        running = record.with_(state=ExportState.RUNNING, revision=2)
        assert database.save(running, before=None, state_before=ExportState.QUEUED)
        (epoch,), _ = ledger.grant([Offer(record.name, "m", 1, StageCall("merge", {}, {}))], "worker", gpus=8)
        assert epoch is not None
        leased = running.with_(revision=3)
        assert database.save(leased, before=running)
        event = Event(kind=EventKind.SUCCEEDED, time=1.0, task="m", attempt=1)
        assert ledger.complete("worker", Held(key, epoch), event)[0]
        task = leased.tasks[0].with_(state=TaskState.SUCCEEDED, outputs={"out": MADE})
        ended = leased.with_(state=ExportState.SUCCEEDED, tasks=(task,), revision=4, end_time=2.0)
        assert database.save(ended, before=leased)


def test_an_export_is_stored_with_few_statements(database: Database) -> None:
    with at_most(3, database):  # the export, its artifacts, and the change for watchers
        assert database.insert(tiny_export("x", tiny_task("m")))


def test_changes_of_one_transaction_are_stored_together(database: Database) -> None:
    with at_most(2 * 10 + 2, database), database.transactions.begin():
        for number in range(10):
            assert database.insert(tiny_export(f"x{number}", tiny_task("m")))


def test_a_task_without_gpus_is_carried_out_with_few_statements(database: Database) -> None:
    first, second = (tiny_export(name, tiny_task("m")) for name in ("x", "y"))
    assert database.insert(first)
    assert database.insert(second)
    # Three revisions, a lease and its end with an event each, what it made and that this is to be measured, and two changes.
    carry_out(database, first, number=3 + 4 + 2 + 2)
    carry_out(database, second, number=3 + 4 + 1 + 2)  # it has made the same again


class Steps:
    """Counts tens of steps of SQLite's machine, within blocks."""

    def __init__(self, database: Database) -> None:
        if database._engine.dialect.name != "sqlite":
            pytest.skip("the plan of PostgreSQL depends on the statistics of the table")
        self._engine, self.made = database._engine, 0
        self._watched = list[Any]()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.made = 0
        sa.event.listen(self._engine, "before_cursor_execute", self._watch)
        try:
            yield
        finally:
            sa.event.remove(self._engine, "before_cursor_execute", self._watch)
            for raw in self._watched:
                raw.set_progress_handler(None, 0)
        assert self.made

    def _watch(self, connection: sa.Connection, *_: object) -> None:
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_progress_handler(self._count, 10)
        self._watched.append(raw)

    def _count(self) -> int:
        self.made += 1
        return 0


def test_an_artifact_of_thousands_of_exports_is_looked_up_by_index(database: Database) -> None:
    """A base has a row for each of its exports, which must not all be read for each new one."""
    count = Steps(database)

    def steps(number: int) -> int:
        """Return what one more export after so many takes."""
        rows = [
            {"project": "default", "digest": DIGEST, "export": f"e{number}-{each}", "create_time": 1.0}
            for each in range(number)
        ]
        add = sa.text("INSERT INTO slipway_artifacts VALUES (:project, :digest, :export, :create_time)")
        with database.transactions.begin() as connection:
            connection.execute(add, rows)
        with count():
            assert database.insert(tiny_export(f"after-{number}", tiny_task("m")))
            assert database.ownership.find_owned("default", [DIGEST]) == {DIGEST}
        return count.made

    few = steps(10)
    assert steps(5000) <= few + 50


def test_the_newest_of_thousands_of_exports_are_found_by_index(database: Database) -> None:
    """A list of all projects must not sort all exports for each page."""
    count, record = Steps(database), tiny_export("first", tiny_task("m")).model_dump_json()
    add = sa.text("""
        INSERT INTO slipway_exports (name, project, create_time, ended, revision, sequence_limit, record)
        VALUES (:name, 'default', :time, false, 1, 0, :record)
    """)

    def steps(number: int) -> int:
        rows = [{"name": f"e{number}-{each}", "time": float(each // 2), "record": record} for each in range(number)]
        with database.transactions.begin() as connection:
            connection.execute(add, rows)
        with count():
            page = database.page((), limit=5)
            database.page((), limit=5, after=(page[-1].create_time, page[-1].name))
            database.page((), limit=5, oldest_first=True)
        return count.made

    few = steps(100)
    assert steps(5000) <= few + 50
