"""The state in a real PostgreSQL: the lock, and the same tables as in SQLite."""

from __future__ import annotations

import random
import threading
import time

import psycopg
import pytest

from slipway.configuration import ExportConfiguration
from slipway.errors import ModelExportError, ServiceError
from slipway.rpc.messages import configuration_message
from slipway_coordinator.api.export_service import new_record
from slipway_coordinator.api.requests import page_of
from slipway_coordinator.leadership.locks import AdvisoryLock, lock_of
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.storage import database as database_module
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import PostgresState, state_at
from slipway_coordinator.storage.filters import parse_filter
from slipway_coordinator.storage.journal import translate_database_errors
from slipway_coordinator.storage.leases import LeaseState
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import DIGEST, tiny_export, tiny_task
from support.servers.postgres_server import PostgresServer


@pytest.fixture
def url(place: str) -> str:
    return state_at(place).url


def export(name: str, **more: object) -> ExportRecord:
    return tiny_export(name, tiny_task("m")).with_(**more)


def test_an_export_and_its_revisions(database: Database) -> None:
    first = export("x", request_id="r1")
    assert database.insert(first)
    assert not database.insert(first)
    assert not database.insert(export("y", request_id="r1"))
    assert database.insert(export("z"))
    assert database.insert(export("z2"))  # without a request_id, any number
    assert database.of_request("default", "r1") == first
    newer = first.with_(revision=3)
    assert database.save(newer)
    assert database.save(newer)  # harmless to repeat
    assert not database.save(first.with_(revision=2))
    assert database.get(first.name) == newer
    assert len(database.unended_runs()) == 3
    assert database.reserve_sequences(first.name) == 0
    assert database.reserve_sequences(first.name) == 10_000
    database.delete(first.name)
    assert database.get(first.name) is None


def test_a_transaction_of_a_coordinator_that_froze_holds_nobody_up(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections may live for hours after its lock was given to another one."""
    url = state_at(server.create(f"d{time.monotonic_ns()}")).url
    active, record = Database(url), export("x")
    active.migrate()
    assert active.insert(record)
    monkeypatch.setattr(database_module, "IDLE_SECONDS", 1)  # from here on: the tables take a slow machine longer
    frozen = Database(url)

    def freeze() -> None:
        with frozen.transactions.begin():
            assert frozen.save(record.with_(revision=2))
            assert active.save(record.with_(revision=3)), "it waited for the other one's transaction"

    with pytest.raises(ServiceError, match="does not answer"):
        translate_database_errors(freeze)
    assert not frozen.save(record.with_(revision=2)), "awake again, it is too late"
    for database in (frozen, active):
        database.close()


def test_the_longest_labels_can_be_stored(database: Database) -> None:
    """Of random characters: what repeats itself is compressed, and fits anywhere."""
    value = "".join(random.Random(1).choices([chr(code) for code in range(0x10000, 0x20000)], k=512))
    request = export_pb2.CreateExportRequest(
        parent="projects/default",
        configuration=configuration_message(ExportConfiguration()),
        sources={"base": DIGEST, "adapter": DIGEST},
        labels={value[:100]: value},
    )
    record = new_record(request)
    assert database.insert(record)
    assert database.get(record.name) == record


def test_leases_have_growing_epochs(database: Database) -> None:
    leases = database.leases
    assert [leases.grant("t", export="e", worker=w) for w in "ab"] == [1, 2]
    assert not leases.move("t", LeaseState.EXPIRED, epoch=1, worker="a"), "it is the other's by now"
    assert leases.move("t", LeaseState.EXPIRED, epoch=2, worker="b")
    assert leases.get("t").state is LeaseState.EXPIRED  # type: ignore[union-attr]
    assert {task: row.epoch for task, row in leases.of("e").items()} == {"t": 2}
    leases.end("t")
    assert not leases.move("t", LeaseState.HELD, epoch=2, worker="b"), "it has ended"
    assert leases.grant("t", export="e", worker="a") is None
    assert leases.get("t").state is LeaseState.ENDED  # type: ignore[union-attr]


def test_epochs_go_on_after_exports_are_forgotten(database: Database) -> None:
    for name, grants in (("x", 3), ("y", 1)):
        assert database.insert(export(name))
        for number in range(grants):
            epoch = database.leases.grant(f"{name}:m:1", export=export(name).name, worker="a")
            assert epoch == number + 1
    for name in ("x", "y", "never leased"):
        database.delete(export(name).name)
    assert database.leases.get("x:m:1") is None
    assert [database.leases.grant(f"{name}:m:1", export=export(name).name, worker="a") for name in "xyz"] == [4, 4, 4]


def test_one_of_two_holds_the_lock(server: PostgresServer) -> None:
    state = state_at(server.create("locked"))
    first, second = lock_of(state), lock_of(state)
    assert first.acquire()
    assert not second.acquire()
    assert second.refusal().reason == "COORDINATOR_LOCKED"
    first.release()
    deadline = time.monotonic() + 60
    while not second.acquire():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second.release()


def test_losing_the_connection_is_noticed_at_once(server: PostgresServer) -> None:
    state = state_at(server.create("losing"))
    assert isinstance(state, PostgresState)
    lost: list[Exception] = []
    noticed = threading.Event()
    lock = AdvisoryLock(state.address, on_lost=lambda error: (lost.append(error), noticed.set()))  # type: ignore[func-returns-value, arg-type]
    assert lock.acquire()
    with psycopg.connect(server.database("losing")) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'slipway-coordinator-lock' AND datname = 'losing'"
        )
    assert noticed.wait(60)
    assert "terminat" in str(lost[0])
    lock.release()


def test_a_database_that_is_not_there_is_waited_for() -> None:
    lock = lock_of(state_at("postgresql://nobody@127.0.0.1:1/none"))
    assert not lock.acquire()
    assert "does not answer" in str(lock.refusal())


def test_what_a_state_is_called() -> None:
    state = state_at("postgresql://user:secret@host/db?passfile=/run/pass")
    assert "secret" in state.url
    assert "secret" not in str(state)
    with pytest.raises(ModelExportError, match="mysql"):
        state_at("mysql://host/db")


def test_artifacts_are_their_projects_for_as_long_as_something_of_it_names_them(database: Database) -> None:
    base, made, other = (f"sha256:{digit * 64}" for digit in "abc")
    record = export("owns", sources={"base": base, "adapter": base})
    owned = database.ownership.find_owned
    assert database.insert(record)
    done = record.tasks[0].with_(outputs={"x": made, "y": made})
    later = record.with_task(done).with_(revision=2)
    assert database.save(later, before=record)
    assert database.save(later, before=record)  # as after a restart
    assert owned("default", [base, made, other]) == {base, made}
    assert owned("elsewhere", [base, made, other]) == set()
    for _ in range(2):
        database.ownership.record_artifact("default", base)
        database.ownership.record_upload("elsewhere", other)
    assert database.ownership.find_uploaded("elsewhere", [base, other]) == {other}
    assert database.ownership.page(None, limit=1) == [base]
    assert database.ownership.page(["default"], limit=9, after=base) == [made]
    database.delete("projects/default/exports/owns")
    assert owned("default", [base, made]) == {base}
    database.ownership.forget_artifacts(before=time.time() + 1)
    assert database.ownership.page(None, limit=9) == []


def test_pages_of_exports_are_cut_where_an_answer_would_be_too_large(database: Database) -> None:
    """One that fits into none comes as its summary; creators can be asked for."""
    for number in range(7):
        facts = {f"fact-{n}": "x" * 10_000 for n in range(400 if number == 2 else 120)}
        large = tiny_export(f"e-{number}", tiny_task("m").with_(facts=facts)).with_(creator="ab"[number % 2])
        assert database.insert(large.with_(create_time=1e9 - number // 2))
    found, after = [list[export_pb2.Export]()], None
    while after is not None or not found[-1]:
        page, after = page_of(database, [], size=1000, after=after, view=export_pb2.EXPORT_VIEW_FULL)
        found.append(page)
    assert [[export.name[-1] for export in page] for page in found] == [[], ["0", "1", "2"], ["3", "4"], ["5", "6"]]
    assert [export.name[-1] for page in found for export in page if not export.tasks] == ["2"]
    page, after = page_of(
        database, parse_filter("creator = b"), size=2, after=None, view=export_pb2.EXPORT_VIEW_SUMMARY
    )
    assert [export.name[-1] for export in page] == ["1", "3"]
    assert after is not None
    page, after = page_of(
        database, parse_filter("creator != a"), size=2, after=after, view=export_pb2.EXPORT_VIEW_SUMMARY
    )
    assert ([export.name[-1] for export in page], after) == (["5"], None)
