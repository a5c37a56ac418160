"""Runs that wait for their first event have no workflow: nothing of them is lost, however often the coordinator starts again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from slipway_coordinator.api import export_service
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.database_access import SqliteState
from slipway_coordinator.workflow import engine
from slipway_protos.v1 import export_pb2, export_pb2_grpc, worker_pb2, worker_pb2_grpc
from support.coordinators.harness import DIGEST, Harness, state, states, tiny_export, tiny_task, wait_for
from support.coordinators.liar import Liar

DONE = worker_pb2.TaskOutput(outputs={"pytorch": DIGEST})
ENDED = {"succeeded", "failed", "cancelled"}
MANY = 2000


def merge_export(export_id: str, *, project: str = "default", priority: int = 0) -> ExportRecord:
    task = tiny_task("m", stage="merge").with_(output="pytorch", params={})
    made = tiny_export(export_id, task)
    return made.with_(name=f"projects/{project}/exports/{export_id}", priority=priority)


def coordinator(home: Path) -> Harness:
    return Harness(home, with_worker=False, options={"workers_gone": False, "lease_seconds": 600})


def waiting(harness: Harness) -> int:
    return len(harness.server.coordinator.broker.board.waiting)


def has_workflow(harness: Harness, record: ExportRecord) -> bool:
    call = harness.server.coordinator.call
    return harness.run(lambda: call(lambda: engine.stored_workflow(record))) is not None


def carry_out(harness: Harness, number: int) -> list[str]:
    """Run the merge of so many exports; return their names in the order in which a worker got them."""
    liar, leased = Liar(harness.address), list[str]()
    try:
        for _ in range(number):
            lease = liar.lease()
            leased.append(lease.task.partition(":")[0])
            assert liar.bring(lease, output=DONE) == ""
    finally:
        liar.close()
    return leased


def hold(harness: Harness, number: int) -> list[worker_pb2.TaskLease]:
    """Lease some tasks and keep them."""
    request = worker_pb2.SynchronizeRequest(worker_id="liar", stages=["merge"], free_slots=number)
    with grpc.insecure_channel(harness.address) as channel:
        held = list(worker_pb2_grpc.WorkerServiceStub(channel).Synchronize(request).leases)
    assert len(held) == number
    return held


def ended(harness: Harness, name: str) -> export_pb2.Export:
    found: export_pb2.Export = wait_for(
        lambda: state(harness.client.get_export(name)) in ENDED and harness.client.get_export(name)
    )
    return found


def test_a_workflow_starts_with_the_first_event(tmp_path: Path) -> None:
    taken, cancelled = merge_export("taken"), merge_export("cancelled")
    with coordinator(tmp_path) as harness:
        for record in (taken, cancelled):
            harness.submit(record)
        wait_for(lambda: waiting(harness) == 2)
        assert states(harness.client.get_export(taken.name)) == {"m": "queued"}
        assert state(harness.client.get_export(taken.name)) == "running"
        assert not has_workflow(harness, taken)
        assert state(harness.client.cancel_export(cancelled.name)) == "cancelled"
        assert has_workflow(harness, cancelled)
        assert carry_out(harness, 1) == [taken.name]
        assert state(ended(harness, taken.name)) == "succeeded"
        assert has_workflow(harness, taken)


def test_a_run_rests_again_after_a_restart(tmp_path: Path) -> None:
    record = merge_export("x")
    with coordinator(tmp_path) as harness:
        harness.submit(record)
        wait_for(lambda: waiting(harness) == 1)
        before = harness.client.get_export(record.name)
    for _ in range(2):
        with coordinator(tmp_path) as harness:
            wait_for(lambda: waiting(harness) == 1)
            assert not has_workflow(harness, record)
            assert harness.client.get_export(record.name) == before
    with coordinator(tmp_path) as harness:
        carry_out(harness, 1)
        export = ended(harness, record.name)
    assert (state(export), len(export.tasks[0].attempts)) == ("succeeded", 1)


def test_what_happened_while_a_run_rested_is_read_by_the_next_process(tmp_path: Path) -> None:
    record = merge_export("x")
    with coordinator(tmp_path) as harness:
        harness.submit(record)
        wait_for(lambda: waiting(harness) == 1)
    database = Database(SqliteState(tmp_path / "state.db").url)
    database.prepare()
    assert database.events.put(
        record.name, Event(kind=EventKind.CANCEL_REQUESTED, time=time.time()), "its process ended"
    )
    database.close()
    with coordinator(tmp_path) as harness:
        assert state(ended(harness, record.name)) == "cancelled"


def store_queued(home: Path, *records: ExportRecord, cancelled: bool = False) -> None:
    """Leave exports as a process does that ends before it begins them, and before it reads their cancellation."""
    database = Database(SqliteState(home / "state.db").url)
    database.prepare()
    for record in records:
        assert database.insert(record)
        event = Event(kind=EventKind.CANCEL_REQUESTED, time=time.time())
        assert not cancelled or database.events.put(record.name, event, f"{record.workflow_id}#cancel")
    database.close()


def hold_resumption(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no export be resumed before the event that is returned is set."""
    go_on, look_up = threading.Event(), engine.stored_workflow

    def held(record: ExportRecord) -> engine.StoredWorkflow | None:
        assert go_on.wait(60)
        return look_up(record)

    monkeypatch.setattr(engine, "stored_workflow", held)
    return go_on


def test_a_cancellation_of_a_run_that_had_not_begun_is_read_by_the_next_process(tmp_path: Path) -> None:
    record = merge_export("x")
    store_queued(tmp_path, record, cancelled=True)
    with coordinator(tmp_path) as harness:
        assert state(ended(harness, record.name)) == "cancelled"


def test_a_cancellation_while_a_run_that_had_not_begun_is_resumed_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_service, "_CANCEL_WAIT_SECONDS", 0.1)
    record = merge_export("x")
    store_queued(tmp_path, record)
    go_on = hold_resumption(monkeypatch)
    with coordinator(tmp_path) as harness:
        wait_for(lambda: not harness.server.coordinator.runs.unresumed)
        assert state(harness.client.cancel_export(record.name)) == "queued"
        go_on.set()
        assert state(ended(harness, record.name)) == "cancelled"


def test_an_export_is_resumed_although_the_caller_that_asked_for_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, asked = merge_export("first"), merge_export("asked")
    store_queued(tmp_path, first, asked.with_(create_time=first.create_time + 1))
    go_on = hold_resumption(monkeypatch)
    with coordinator(tmp_path) as harness:
        wait_for(lambda: list(harness.server.coordinator.runs.unresumed) == [asked.name])
        with grpc.insecure_channel(harness.address) as channel:
            call = export_pb2_grpc.ExportServiceStub(channel).CancelExport.future(
                export_pb2.CancelExportRequest(name=asked.name)
            )
            wait_for(lambda: not harness.server.coordinator.runs.unresumed)
            call.cancel()
        time.sleep(0.2)  # until the server knows
        go_on.set()
        wait_for(lambda: waiting(harness) == 2)


def test_a_retry_rests_too(tmp_path: Path) -> None:
    record = merge_export("x")
    with coordinator(tmp_path) as harness:
        harness.submit(record)
        wait_for(lambda: waiting(harness) == 1)
        harness.client.cancel_export(record.name)
        ended(harness, record.name)
        harness.client.retry_export(record.name)
        wait_for(lambda: waiting(harness) == 1)
        again = record.with_(run=2)
        assert not has_workflow(harness, again)
        carry_out(harness, 1)
        assert state(ended(harness, record.name)) == "succeeded"
        assert has_workflow(harness, again)


@pytest.mark.slow
def test_2000_exports_of_mixed_states_go_on_as_they_were(tmp_path: Path) -> None:
    """Queued, leased, ended and cancelled exports of three projects and priorities, over a restart: contents, order, and nothing twice."""
    records = [
        merge_export(f"e{number:04}", project="abc"[number % 3], priority=number % 5 - 2) for number in range(MANY)
    ]
    with coordinator(tmp_path) as harness:
        for record in records:
            harness.submit(record)
        wait_for(lambda: waiting(harness) == MANY, seconds=400)
        first = carry_out(harness, 60)
        held = hold(harness, 5)
        leased = {lease.task.partition(":")[0] for lease in held}
        for name in leased:
            wait_for(lambda: states(harness.client.get_export(name)) == {"m": "running"})  # noqa: B023 - waited for here
        stopped = {record.name for record in records if record.name not in {*first, *leased}}
        cancelled = sorted(stopped)[::400]
        for name in cancelled:
            assert state(harness.client.cancel_export(name)) == "cancelled"
        for name in first:
            ended(harness, name)
        before = {each.name: each for each in harness.client.list_exports(project="-")}
    with coordinator(tmp_path) as harness:
        left = MANY - len(first) - len(held) - len(cancelled)
        wait_for(lambda: waiting(harness) == left, seconds=400)
        after = {each.name: each for each in harness.client.list_exports(project="-")}
        assert after == before
        liar = Liar(harness.address)
        for lease in held:  # of the process before
            assert liar.bring(lease, output=DONE) == ""
        liar.close()
        order = carry_out(harness, left)
        assert sorted(order) == sorted(set(before) - set(first) - leased - set(cancelled))
        for project in "abc":  # within a project: the higher priority first, then the oldest
            names = [name for name in order if name.startswith(f"projects/{project}/")]
            expected = sorted(
                (record for record in records if record.name in set(names)),
                key=lambda each: (-each.priority, each.create_time),
            )
            assert names == [record.name for record in expected]
        turns = Counter(name.split("/")[1] for name in order[:300])
        assert max(turns.values()) - min(turns.values()) <= 2, turns
        wait_for(lambda: not harness.server.coordinator.unended, seconds=400)
        final = Counter(state(each) for each in harness.client.list_exports(project="-"))
    assert final == {"succeeded": MANY - len(cancelled), "cancelled": len(cancelled)}
