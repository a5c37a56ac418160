"""What a start reads of exports that have not ended, and lists of exports that a program without summaries wrote."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from slipway.errors import Failure, ServiceError
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.lifecycle.summaries import ExportSummary
from slipway_coordinator.storage import schema
from slipway_coordinator.storage.database import Database
from support.coordinators.harness import tiny_export, tiny_task

# What the program before summaries runs, also after the migration.
OLD_INSERT = sa.text("""
    INSERT INTO slipway_exports
        (name, project, create_time, request_id, creator, sequence_limit, state, ended, end_time, revision, run, record)
    VALUES (:name, :project, :create_time, NULL, '', 0, :state, :ended, :end_time, :revision, :run, :record)
""")
OLD_SAVE = sa.text("""
    UPDATE slipway_exports SET state = :state, ended = :ended, end_time = :end_time, revision = :revision, run = :run, record = :record
    WHERE name = :name AND revision < :revision
""")
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


def old_row(record: ExportRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "project": record.project,
        "create_time": record.create_time,
        "state": record.state.value,
        "ended": record.state.ended,
        "end_time": record.end_time,
        "revision": record.revision,
        "run": record.run,
        "record": record.model_dump_json(),
    }


def test_lists_show_what_a_program_without_summaries_wrote_last(database: Database) -> None:
    record = tiny_export("x", tiny_task("m")).with_(labels={"team": "speech"})
    failed = record.with_(state=ExportState.FAILED, failure=Failure("INTERNAL", "why"), end_time=2.5, revision=2)
    with database.transactions.begin() as connection:
        connection.execute(OLD_INSERT, old_row(record))
    assert database.summaries([], limit=9) == [ExportSummary.of(record)]
    with database.transactions.begin() as connection:
        connection.execute(OLD_SAVE, old_row(failed))
    assert database.summaries([], limit=9) == [ExportSummary.of(failed)]
    newest = failed.with_(labels={}, revision=3)
    assert database.save(newest)
    with database.transactions.begin() as connection:  # now the summary is read, and not the record
        connection.execute(sa.update(schema.exports).values(record="{}"))
    assert database.summaries([], limit=9) == [ExportSummary.of(newest)]
