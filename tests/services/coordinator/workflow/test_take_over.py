"""An export of another version is taken over from where it is, also when this process ends in the middle of that."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from slipway_coordinator.coordinator import Coordinator, CoordinatorOptions
from slipway_coordinator.lifecycle import transitions
from slipway_coordinator.lifecycle.records import ExportRecord
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage import schema
from slipway_coordinator.storage.database_access import SqliteState
from slipway_coordinator.workflow import engine
from support.coordinators.harness import tiny_export, tiny_task


@pytest.mark.parametrize("version", ["slipway-2", "slipway-of-another-day"])
def test_a_take_over_that_is_repeated_skips_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    coordinator = Coordinator(CoordinatorOptions(SqliteState(tmp_path / "state.db")))
    database, started, tries = coordinator.database, list[ExportRecord](), 0
    database.prepare()
    record = transitions.begin(tiny_export("x", tiny_task("m")), now=1.0).with_(revision=5, events_read=3)
    database.insert(record)
    for number in range(1, 6):
        database.events.put(record.name, Event(kind=EventKind.CANCEL_REQUESTED, time=float(number)), f"event {number}")
    if version == "slipway-2":
        with database.transactions.begin() as connection:
            stored = json.loads(connection.execute(sa.select(schema.exports.c.record)).scalar_one())
            assert stored.pop("events_read") == 3
            connection.execute(sa.update(schema.exports).values(record=json.dumps(stored)))

    def forget(_: ExportRecord) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("killed")

    async def start(taken: ExportRecord) -> None:
        started.append(taken)

    monkeypatch.setattr(engine, "forget_run", forget)
    monkeypatch.setattr(engine, "start", start)

    async def take_over() -> None:
        found = await coordinator.load(record.name)
        assert found is not None
        await coordinator.runs.take_over(found, engine.StoredWorkflow(version, "PENDING", first_revision=1))

    async def run() -> None:
        with pytest.raises(RuntimeError):
            await take_over()
        await take_over()
        while not started:
            await asyncio.sleep(0.01)

    try:
        asyncio.run(run())
    finally:
        coordinator._executor.shutdown()
        coordinator.journal.close()
        database.close()
    assert [taken.events_read for taken in started] == [3]
