"""The table of changes: one row for each change, in the transaction that makes it, numbered without gaps; in SQLite and PostgreSQL."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from slipway_coordinator.lifecycle.changes import ChangeKind
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.server import migrate
from slipway_coordinator.storage import changes as changes_module
from slipway_coordinator.storage.changes import BEGINNING, Position
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import state_at
from slipway_coordinator.storage.journal import Journal
from support.coordinators.harness import tiny_export, tiny_task
from support.servers.postgres_server import PostgresServer


def record(name: str = "x", *, project: str = "default") -> ExportRecord:
    return tiny_export(name, tiny_task("m")).with_(
        name=f"projects/{project}/exports/{name}", labels={"team": "speech"}, warnings=("w" * 1000,)
    )


def kinds(database: Database, *, after: int = 0) -> list[tuple[str, str, str]]:
    rows = database.changes.after(after, limit=100)
    assert [row.sequence for row in rows] == list(range(after + 1, after + 1 + len(rows)))
    return [
        (row.change.kind.value, row.change.export.name.rpartition("/")[2], row.change.export.state.value)
        for row in rows
    ]


def test_each_change_is_a_row_and_its_repetition_none(database: Database) -> None:
    first = record()
    assert database.insert(first)
    assert not database.insert(first)
    running = first.with_(state=ExportState.RUNNING, revision=2)
    for _ in range(2):
        assert database.save(running, before=first)
    assert database.save(running.with_(revision=3, recovery_profile="balanced"), before=running), "no change of state"
    assert not database.save(first.with_(state=ExportState.FAILED)), "an older revision"
    assert database.save(running.with_(state=ExportState.FAILED, revision=4))  # whose state before is that of the table
    assert database.save(first.with_(run=2, revision=5))
    for _ in range(2):
        database.delete(first.name)
    database.delete("projects/default/exports/none")
    assert kinds(database) == [
        ("created", "x", "queued"),
        ("state_changed", "x", "running"),
        ("state_changed", "x", "failed"),
        ("state_changed", "x", "queued"),
        ("deleted", "x", "queued"),
    ]
    rows = database.changes.after(0, limit=9)
    assert [row.change.previous and row.change.previous.value for row in rows] == [
        None, "queued", "running", "failed", "queued",
    ]  # fmt: skip
    assert rows[0].change.kind is ChangeKind.CREATED
    assert rows[-1].change.export.labels == {"team": "speech"}, "of an export that is there no more"
    assert all(not row.change.export.warnings and not row.change.export.tasks for row in rows)
    assert all(abs(row.time - time.time()) < 60 for row in rows)


async def test_a_change_whose_transaction_fails_has_no_row(database: Database) -> None:
    told: list[bool] = []
    journal = Journal(database.transactions, on_commit=lambda: told.append(database.changes.take_added()))

    def fail() -> None:
        database.insert(record("lost"))
        raise ValueError("refused")

    try:
        with pytest.raises(ValueError, match="refused"):
            await journal.commit(fail)
        assert await journal.commit(lambda: database.insert(record("kept")))
        assert kinds(database) == [("created", "kept", "queued")]
        assert told[-1], "whoever waits for changes is woken"
        await journal.commit(lambda: None)
        assert told[-1] is False
    finally:
        journal.close()


def test_two_writers_never_take_the_same_number(server: PostgresServer) -> None:
    state = state_at(server.create(f"d{time.monotonic_ns()}"))
    migrate(state)
    first, second = Database(state.url), Database(state.url)
    with ThreadPoolExecutor(1) as thread:
        try:
            with first.transactions.begin():
                assert first.insert(record("a"))
                other = thread.submit(second.insert, record("b"))
                with pytest.raises(TimeoutError):
                    other.result(0.3)
            assert other.result(30)
            assert kinds(first) == [("created", "a", "queued"), ("created", "b", "queued")]
        finally:
            first.close()
            second.close()


def test_writers_at_the_same_time_leave_no_gap(server: PostgresServer) -> None:
    """Their exports have nothing in common that would make one wait for the other."""
    state = state_at(server.create(f"d{time.monotonic_ns()}"))
    migrate(state)
    writers = [Database(state.url) for _ in range(3)]

    def write(writer: int) -> None:
        database = writers[writer]
        for number in range(10):
            with database.transactions.begin():
                for part in "ab"[: number % 2 + 1]:
                    name = f"{writer}-{number}{part}"
                    assert database.insert(record(name, project=f"p{writer}").with_(sources={"base": f"of {name}"}))

    try:
        with ThreadPoolExecutor(len(writers)) as threads:
            list(threads.map(write, range(len(writers))))
        told = [name for _, name, _ in kinds(writers[0])]
        assert len(told) == 45
        for writer in range(len(writers)):
            own = [name for name in told if name.startswith(f"{writer}-")]
            assert own == sorted(own), "in the order in which it made them"
    finally:
        for database in writers:
            database.close()


def test_changes_of_one_transaction_are_numbered_under_one_lock(server: PostgresServer) -> None:
    state = state_at(server.create(f"d{time.monotonic_ns()}"))
    migrate(state)
    database, locked = Database(state.url), list[str]()
    sa.event.listen(
        database._engine,
        "before_cursor_execute",
        lambda *said: locked.append(said[2]) if "advisory" in said[2] else None,
    )
    try:
        for names in (["a", "b", "c"], ["d"]):
            locked.clear()
            with database.transactions.begin():
                assert all(database.insert(record(name)) for name in names)
            assert len(locked) == 1
        assert [name for _, name, _ in kinds(database)] == ["a", "b", "c", "d"]
    finally:
        database.close()


def test_changes_of_some_projects_keep_their_numbers(database: Database) -> None:
    for number in range(6):
        database.insert(record(f"x{number}", project="red" if number % 2 else "blue"))
    assert [row.sequence for row in database.changes.after(0, limit=9, projects=["red"])] == [2, 4, 6]
    assert [row.sequence for row in database.changes.after(2, limit=1, projects=["red", "blue"])] == [3]
    assert database.changes.after(0, limit=9, projects=[]) == []


def test_little_is_read_at_a_time_if_labels_are_long(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "AT_ONCE", 10_000)
    for number in range(5):
        labels = {f"l{n}": "w" * 1000 for n in range(6)}
        database.insert(record(f"x{number}").with_(labels=labels))
    found = database.changes.after(0, limit=9)
    assert [row.sequence for row in found] == [1, 2], "the second one does not fit, but something is always read"
    assert all(row.size > 6000 for row in found)


def test_a_place_is_valid_as_long_as_its_row_is_there(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = database.changes
    assert changes.newest() == BEGINNING
    assert changes.has(BEGINNING)
    database.insert(record("x0"))
    first = changes.newest()
    assert changes.has(BEGINNING)
    assert changes.has(first)
    assert Position.parse(first.cursor) == first
    assert not changes.has(Position(1, first.mark + 1)), "the row of a restored copy"
    assert not changes.has(Position(2, first.mark)), "of the future"
    monkeypatch.setattr(changes_module, "CHANGES_KEPT", 5)
    monkeypatch.setattr(changes_module, "_FORGET_EVERY", 10)
    for number in range(1, 20):
        database.insert(record(f"x{number}"))
    assert changes.oldest() == 16
    assert not changes.has(first)
    assert not changes.has(BEGINNING)
    assert [row.sequence for row in changes.after(0, limit=99)] == [16, 17, 18, 19, 20]
    with database._engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM slipway_changes WHERE sequence < 20"))
    database.insert(record("last"))
    assert changes.newest().sequence == 21, "numbers go on"


def test_changes_with_long_labels_are_forgotten_earlier(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "BYTES_KEPT", 1 << 20)
    monkeypatch.setattr(changes_module, "_FORGET_EVERY", 10)
    labels = {f"l{number}": "é" * 1000 for number in range(64)}  # 128 kB, as UTF-8
    for number in range(20):
        database.insert(record(f"x{number}").with_(labels=labels))
    kept = [row.sequence for row in database.changes.after(0, limit=8)]
    assert kept[0] == database.changes.oldest() == 13
    assert kept == list(range(13, 21))
    for number in range(10):
        database.insert(record(f"y{number}"))
    assert database.changes.oldest() == 13, "short ones take little"
    with database._engine.connect() as connection:
        assert connection.execute(sa.text("SELECT COUNT(*) FROM slipway_changes")).scalar_one() == 18


@pytest.mark.parametrize("broken", [(1,), (2,), (1, 2), (3,), (1, 2, 3)])
def test_a_row_that_cannot_be_parsed_is_left_out(
    database: Database, caplog: pytest.LogCaptureFixture, broken: tuple[int, ...]
) -> None:
    for name in "abc":
        database.insert(record(name))
    with database._engine.begin() as connection:
        for number in broken:
            connection.execute(
                sa.text("UPDATE slipway_changes SET change = :text WHERE sequence = :number"),
                {"text": '{"kind": "of a later version"}', "number": number},
            )
    for limit in (1, 9):
        found, after = list[int](), 0
        while rows := database.changes.after(after, limit=limit):
            found += [row.sequence for row in rows]
            after = found[-1]
        assert found == [number for number in (1, 2, 3) if number not in broken]
    assert f"the change {broken[0]} of an export is left out" in caplog.text
    assert database.changes.has(database.changes.newest())


def test_a_place_tells_nothing_of_the_change_before_it(database: Database) -> None:
    for name in "ab":
        database.insert(record(name))
    first, second = database.changes.after(0, limit=9)
    assert database.changes.newest() == second.position
    assert first.position.mark != second.position.mark
    now = time.time() * 1e6
    for row in (first, second):
        assert abs(row.position.mark - now) > 1e12, "no time"
        assert database.changes.has(row.position)


@pytest.mark.parametrize(
    "text", ["", "1", "-", "1-", "g-1", "1-1-1", "1" * 16 + "-1", "1-" + "1" * 16, " 1-1", "1-1\n", "A-1", "١-١"]
)
def test_what_is_no_cursor_is_none(text: str) -> None:
    assert Position.parse(text) is None
