"""Summaries of exports: the same as what is made of the whole record, of this version and of others."""

from __future__ import annotations

import json

import pytest

from slipway.errors import Failure
from slipway_coordinator.api.messages import export_summary
from slipway_coordinator.lifecycle import summaries
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskState
from slipway_coordinator.lifecycle.summaries import ExportSummary, record_shape, summary_text
from support.coordinators.harness import DIGEST, tiny_export, tiny_task

MADE = "sha256:" + "1" * 64


def records() -> list[ExportRecord]:
    made = tiny_task("gguf-q8_0").with_(state=TaskState.SUCCEEDED, outputs={"gguf": MADE})
    failure = Failure(
        "OUT_OF_MEMORY", 'it took "all" of it\n', "less", "StageError", {"stage": "merge"}, retryable=True
    )
    plain = tiny_export("x", tiny_task("merge"), base=DIGEST)
    everything = plain.with_(
        tasks=(made, tiny_task("other")),
        state=ExportState.FAILED,
        failure=failure,
        warnings=("one", "zwei €"),
        labels={"team": "speech"},
        priority=-3,
        creator="ci",
        revision=9,
        run=2,
        end_time=12.5,
        recovery_profile="balanced",
        traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
    )
    return [plain, everything]


@pytest.mark.parametrize("record", records(), ids=["plain", "everything"])
def test_a_summary_is_what_clients_see_of_the_record(record: ExportRecord) -> None:
    read = ExportSummary.parse(summary_text(record))
    assert export_summary(read) == export_summary(record)
    assert export_summary(ExportSummary.of(record)) == export_summary(record)
    assert read.etag == record.etag
    for heavy in ("configuration", "sources", "tasks"):
        assert heavy not in json.loads(summary_text(record))


def test_what_another_version_added_is_left_out() -> None:
    (record, _) = records()
    newer = json.dumps(json.loads(summary_text(record)) | {"mood": "good"})
    assert ExportSummary.parse(newer) == ExportSummary.parse(summary_text(record))


def test_what_another_version_added_to_a_failure_is_left_out() -> None:
    (_, record) = records()
    newer = json.loads(summary_text(record))
    newer["failure"]["cause"] = "unknown here"
    assert ExportSummary.parse(json.dumps(newer)) == ExportSummary.parse(summary_text(record))


def test_a_state_that_this_version_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="suspended"):
        ExportSummary.parse('{"name": "projects/p/exports/e", "create_time": 1.0, "state": "suspended"}')


def test_the_shape_of_records_differs_with_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ExportRecord):
        mood: str = ""

    known = record_shape()
    assert record_shape() == known
    monkeypatch.setattr(summaries, "ExportRecord", Longer)
    assert record_shape.__wrapped__() != known
