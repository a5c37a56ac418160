"""Exports that only name their sources: one task that imports them, then the plan. Pure functions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slipway.configuration import parse
from slipway.errors import Failure, ModelExportError
from slipway.planning.plan import plan
from slipway.rpc.messages import configuration_message
from slipway.sources.addresses import Allowed
from slipway_coordinator.api.export_service import new_record
from slipway_coordinator.lifecycle import transitions
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, Resources, TaskRecord, TaskState
from slipway_coordinator.lifecycle.recovery import NextAttempt
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_protos.v1 import export_pb2

BASE, ADAPTER, OTHER = ("sha256:" + digit * 64 for digit in "abc")
URLS = {"checkpoint": {"path": "s3://training/red/run"}, "base_model": {"name": "hf://org/tiny"}}
INT4 = {"quantization": "int4", "method": "auto"}
ALLOWED = Allowed.parse("s3://training/{project} hf://org")
FACTS = {
    "urls": {"base": "hf://org/tiny@0123", "adapter": "s3://training/red/run/checkpoint-3"},
    "labels": {"model_name": "run", "base_model": "org/tiny\x1b[2J"},
    "source_formats": {},
}


def record(sources: dict[str, str] | None = None, *, allowed: Allowed = ALLOWED, **changes: Any) -> ExportRecord:
    configuration = configuration_message(parse({**URLS, **changes}))
    request = export_pb2.CreateExportRequest(
        parent="projects/red", export_id="e", configuration=configuration, sources=sources or {}, labels={"mine": "x"}
    )
    return new_record(request, import_from=allowed)


def running(record: ExportRecord) -> ExportRecord:
    begun = transitions.begin(record, now=1.0)
    return transitions.apply(begun, event(EventKind.LEASED, worker="w", epoch=1))


def event(kind: EventKind, task: str = "import", *, attempt: int = 1, **fields: Any) -> Event:
    return Event(kind=kind, time=time.time(), task=task, attempt=attempt, **fields)


def imported(record: ExportRecord, *, attempt: int = 1, **outputs: str) -> ExportRecord:
    made = {"base": BASE, "adapter": ADAPTER} | outputs
    return transitions.apply(record, event(EventKind.SUCCEEDED, attempt=attempt, outputs=made, facts=FACTS))


def test_sources_that_are_only_named_are_one_task() -> None:
    (task,) = record().tasks
    assert (task.id, task.stage, task.inputs) == ("import", "import", {})
    assert task.params["imports"] == {"adapter": "s3://training/red/run", "base": "hf://org/tiny"}
    assert task.params["sources"]["checkpoint"]["path"] == "s3://training/red/run"


def test_brought_sources_are_looked_at_by_digest() -> None:
    (task,) = record({"adapter": ADAPTER}).tasks
    assert task.inputs == {"adapter": "source:adapter"}
    assert task.params["imports"] == {"base": "hf://org/tiny"}
    assert task.params["sources"]["checkpoint"]["path"] == ADAPTER


def test_brought_sources_alone_need_no_import_whatever_the_configuration_names() -> None:
    sources = {"adapter": ADAPTER, "base": BASE}
    expected = plan(parse(URLS), sources)
    assert [task.id for task in record(sources, allowed=Allowed()).tasks] == [task.id for task in expected]


@pytest.mark.parametrize(("size", "parts"), [(20 << 30, 3), (1 << 30, 0), (None, 0)])
def test_the_size_of_an_imported_base_divides_the_work_behind_it(size: int | None, parts: int) -> None:
    facts = FACTS if size is None else {**FACTS, "weight_bytes": size}
    begun = running(record(execution={"split_bytes": 8 << 30}))
    made = {"base": BASE, "adapter": ADAPTER}
    planned = transitions.apply(begun, event(EventKind.SUCCEEDED, outputs=made, facts=facts))
    found = [task for task in planned.tasks if task.id.startswith("merge.part")]
    assert len(found) == parts
    assert all(task.state is TaskState.QUEUED and task.inputs["base"] == "task:import/base" for task in found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"checkpoint": {"path": "s3://training/blue/run"}}, "SOURCE_NOT_ALLOWED"),
        ({"base_model": {"name": "hf://others/x"}}, "SOURCE_NOT_ALLOWED"),
        ({"validation": {"heldout": "s3://secrets/x"}}, "SOURCE_NOT_ALLOWED"),
        ({"validation": {"test_input_samples": "s3://secrets/x"}}, "SOURCE_NOT_ALLOWED"),
        ({"combination": {"adapters": ["s3://secrets/x"]}}, "SOURCE_NOT_ALLOWED"),
        ({"optimization": INT4 | {"calibration": "s3://secrets/x"}}, "SOURCE_NOT_ALLOWED"),
        ({"optimization": INT4 | {"calibration": "/etc"}}, "REQUEST_INVALID"),
        ({"base_model": {"name": "/models/base"}}, "REQUEST_INVALID"),
        ({"base_model": {"name": OTHER}}, "REQUEST_INVALID"),
        ({"checkpoint": {"path": OTHER}}, "REQUEST_INVALID"),
        ({"combination": {"adapters": [OTHER]}}, "REQUEST_INVALID"),
    ],
)
def test_what_a_client_may_not_name_is_refused_at_once(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelExportError) as raised:
        record(**changes)
    assert raised.value.reason == reason


def test_a_digest_or_path_of_texts_reaches_no_worker() -> None:
    for where in (OTHER, "/etc"):
        for key in ("heldout", "test_input_samples"):
            (task,) = record(validation={key: where}).tasks
            assert task.params["sources"]["validation"][key] == ""


def test_text_for_calibration_is_imported_or_named_by_its_digest() -> None:
    (task,) = record(optimization=INT4 | {"calibration": "s3://training/red/texts"}).tasks
    assert task.params["imports"]["calibration"] == "s3://training/red/texts"
    assert task.params["sources"]["optimization"] == {"calibration": "s3://training/red/texts"}
    for named in ({"calibration": "/etc"}, {}):  # without a setting, the client brings the sample of a local run
        (task,) = record({"calibration": OTHER}, optimization=INT4 | named).tasks
        assert "calibration" not in task.params["imports"]
        assert task.inputs == {"calibration": "source:calibration"}
        assert task.params["sources"]["optimization"] == {"calibration": OTHER}


BOTH = {"optimization": INT4 | {"calibration": "s3://training/red/a"}, "validation": {"heldout": "s3://training/red/b"}}


def test_one_text_to_calibrate_and_to_judge_by_is_refused_as_soon_as_it_is_known() -> None:
    for sources, named in (
        ({"calibration": OTHER, "heldout": OTHER}, BOTH),
        ({}, BOTH | {"validation": {"heldout": "s3://training/red/a"}}),
    ):
        with pytest.raises(ModelExportError) as raised:
            record(sources, **named)
        assert raised.value.reason == "CALIBRATION_OVERLAP"
        assert raised.value.remedy
    after = imported(running(record(**BOTH)), calibration=OTHER, heldout=OTHER)
    assert [task.id for task in transitions.undecided_tasks(after)] == ["import"]
    assert reason_of(after) == "CALIBRATION_OVERLAP"
    apart = imported(running(record(**BOTH)), calibration=OTHER, heldout=BASE)
    assert "calibration_data" in {task.id for task in apart.tasks}


def test_one_text_for_both_is_taken_where_nothing_is_judged_or_calibrated_by_it() -> None:
    both = {"calibration": OTHER, "heldout": OTHER}
    assert record({"calibration": OTHER}, **BOTH | {"validation": {"enabled": False}}).tasks
    assert record(both, **BOTH | {"optimization": {"quantization": "int4", "method": "rtn"}}).tasks


def test_the_plan_follows_the_import() -> None:
    after = imported(running(record()))
    expected = plan(parse(URLS), {"base", "adapter"})
    assert [task.id for task in after.tasks] == ["import", *(task.id for task in expected)]
    assert after.sources == {"adapter": ADAPTER, "base": BASE}
    assert after.labels == {"mine": "x", "model_name": "run", "base_model": "org/tiny\ufffd[2J"}
    merge = after.task("merge")
    assert (merge.state, merge.attempt.inputs) == (TaskState.QUEUED, {"adapter": ADAPTER, "base": BASE})
    assert after.state is ExportState.RUNNING
    assert ExportRecord.from_json(after.to_json()) == after


def test_a_base_that_has_to_be_prepared_is() -> None:
    facts = {**FACTS, "source_formats": {"base": "gptq"}}
    done = event(EventKind.SUCCEEDED, outputs={"base": BASE, "adapter": ADAPTER}, facts=facts)
    after = transitions.apply(running(record()), done)
    assert after.task("prepare").inputs == {"base": "task:import/base"}
    assert after.task("merge").state is TaskState.WAITING


@pytest.mark.parametrize("outputs", [{"base": BASE}, {"base": BASE, "adapter": ADAPTER, "more": OTHER}, {}])
def test_an_import_of_something_else_has_failed(outputs: dict[str, str]) -> None:
    after = transitions.apply(running(record()), event(EventKind.SUCCEEDED, outputs=outputs, facts=FACTS))
    assert [task.id for task in transitions.undecided_tasks(after)] == ["import"]
    assert reason_of(after) == "RESULT_INVALID"
    assert len(after.tasks) == 1


@pytest.mark.parametrize(
    "facts",
    [
        {"urls": []},
        {"urls": {"base": 1.0}},
        {"urls": {"heldout": "hf://org/tiny"}},
        {"labels": "run"},
        {"labels": {"model_name": None}},
        {"source_formats": {"base": "future"}},
        {"source_formats": {"other": "gptq"}},
        {"source_formats": ["gptq"]},
    ],
)
def test_impossible_facts_of_an_import_are_a_failure_of_its_worker(facts: dict[str, Any]) -> None:
    outputs = {"base": BASE, "adapter": ADAPTER}
    after = transitions.apply(running(record()), event(EventKind.SUCCEEDED, outputs=outputs, facts={**FACTS, **facts}))
    assert reason_of(after) == "RESULT_INVALID"
    assert len(after.tasks) == 1


def test_facts_of_an_import_may_be_missing() -> None:
    outputs = {"base": BASE, "adapter": ADAPTER}
    after = transitions.apply(running(record()), event(EventKind.SUCCEEDED, outputs=outputs))
    assert after.task("merge").state is TaskState.QUEUED


def test_an_import_that_ends_while_its_export_is_cancelled_is_followed_by_nothing() -> None:
    after = imported(transitions.cancel(running(record()), now=2.0))
    assert after.task("import").state is TaskState.SUCCEEDED
    assert {task.state for task in after.tasks[1:]} == {TaskState.CANCELLED}
    assert after.state is ExportState.CANCELLED
    again = transitions.begin(transitions.restart(after), now=9.0)
    assert again.task("merge").state is TaskState.QUEUED


def reason_of(after: ExportRecord) -> str:
    (failed,) = transitions.undecided_tasks(after)
    assert failed.attempt.failure is not None
    return failed.attempt.failure.reason


def lost(after: ExportRecord) -> ExportRecord:
    """The merge found that the store has lost the base."""
    failure = Failure(reason="ARTIFACT_NOT_FOUND", message="gone", about={"digest": BASE})
    after = transitions.apply(after, event(EventKind.LEASED, "merge", worker="w", epoch=2))
    after = transitions.apply(after, event(EventKind.FAILED, "merge", failure=failure))
    following = NextAttempt(
        rule="inputs", note="", params=after.task("merge").params, remake_inputs=True, resources=Resources()
    )
    return transitions.retry(after, "merge", following, now=5.0)


def test_what_the_store_lost_is_imported_again_as_it_was() -> None:
    after = lost(imported(running(record())))
    again = after.task("import")
    assert again.attempt.params["pinned"]["base"] == {"url": "hf://org/tiny@0123", "digest": BASE}
    done = imported(after, attempt=2)
    assert len(done.tasks) == len(after.tasks)
    assert done.task("merge").state is TaskState.QUEUED


def test_other_content_under_the_address_is_no_second_import() -> None:
    after = imported(lost(imported(running(record()))), attempt=2, base=OTHER)
    (failed,) = transitions.undecided_tasks(after)
    assert failed.attempt.failure is not None
    assert failed.attempt.failure.reason == "SOURCE_CHANGED"
    assert after.sources["base"] == BASE


def test_a_retried_export_keeps_what_was_imported() -> None:
    after = transitions.cancel(imported(running(record())), now=9.0)
    again = transitions.restart(after.move_to(ExportState.CANCELLED) if not after.state.ended else after)
    assert again.task("import").state is TaskState.SUCCEEDED
    assert isinstance(again.task("merge"), TaskRecord)
