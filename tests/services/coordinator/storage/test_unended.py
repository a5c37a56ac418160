"""What a start reads of exports that have not ended."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway_coordinator.lifecycle.records import ExportState
from slipway_coordinator.storage import schema
from slipway_coordinator.storage.database import Database
from support.coordinators.harness import tiny_export, tiny_task

OTHER = "as another program knows it"[:16]


def test_runs_are_read_oldest_first_without_their_records(database: Database) -> None:
    records = [tiny_export(f"x{number}", tiny_task("m")).with_(create_time=100.0 - number) for number in range(3)]
    for record in (*records, tiny_export("ended", tiny_task("m")).with_(state=ExportState.FAILED)):
        assert database.insert(record)
    assert database.save(records[1].with_(run=2, revision=5))
    with database.transactions.begin() as connection:  # a record that would be refused
        connection.execute(sa.update(schema.exports).values(record="{}"))
    assert list(database.unended_runs().items()) == [(records[2].name, 1), (records[1].name, 2), (records[0].name, 1)]


def test_records_of_another_shape_are_checked(database: Database) -> None:
    record = tiny_export("x", tiny_task("m"))
    assert database.insert(record)
    with database.transactions.begin() as connection:
        connection.execute(sa.update(schema.exports).values(shape=OTHER))
    assert database.unended_runs() == {record.name: 1}
    with database.transactions.begin() as connection:
        connection.execute(sa.update(schema.exports).values(record='{"name": "projects/p/exports/e", "state": "new"}'))
    with pytest.raises(ServiceError, match="projects/p/exports/e") as caught:
        database.unended_runs()
    assert caught.value.reason == "STATE_SCHEMA"


def test_a_program_that_writes_a_record_notes_its_shape(database: Database) -> None:
    record = tiny_export("x", tiny_task("m"))
    assert database.insert(record)
    with database.transactions.begin() as connection:
        connection.execute(sa.update(schema.exports).values(shape=OTHER))
    assert database.save(record.with_(revision=2))
    with database.transactions.begin() as connection:
        connection.execute(sa.update(schema.exports).values(record="{}"))
    assert database.unended_runs() == {record.name: 1}
