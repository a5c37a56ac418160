"""An output that fails with integers rounded without data is made again with a calibration, which runs only then."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.errors import Failure
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway.validation.verdicts import Answer, Verdict
from slipway_coordinator.lifecycle import gate, transitions
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskRecord, TaskState
from slipway_coordinator.lifecycle.recovery import NextAttempt
from slipway_coordinator.lifecycle.rules import default_rules
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.workflow.workflow import decide
from slipway_validate.validation import _summary
from support.coordinators.harness import tiny_export

TEXT, CALIBRATE = "calibration_data", "calibrate-int4"


def begun(**settings: Any) -> ExportRecord:
    """Begin an export to int4 in two formats, whose calibration is in reserve."""
    fallback = "integers are rounded without data"
    trunk = [
        TaskRecord(id="merge", stage="merge", params={}, inputs={"base": "source:base"}, format="pytorch"),
        TaskRecord(id=TEXT, stage=TEXT, params={}, inputs={"model": "task:merge/model"}, fallback=fallback),
        TaskRecord(
            id=CALIBRATE,
            stage="calibrate",
            params={"bits": 4, "group_size": 32},
            inputs={"model": "task:merge/model", "data": f"task:{TEXT}/model"},
            fallback=fallback,
        ),
    ]
    made = [
        TaskRecord(
            id=name,
            stage="quantize",
            params={"format": "pytorch", "level": "int4", "group_size": 32, "packed": True},
            inputs={"model": "task:merge/model"},
            reserve={"calibration": f"task:{CALIBRATE}/model"},
            format=f"{name}-int4",
        )
        for name in ("pytorch", "onnx")
    ]
    validate = TaskRecord(
        id="validate",
        stage="validate",
        params={},
        inputs={"base": "source:base", **{task.format: f"task:{task.id}/model" for task in (trunk[0], *made)}},
        format="validation",
        partial=True,
    )
    configured = {"validation": {"on_failure": "fallback"}, "recovery": {"max_attempts": 6}, **settings}
    return transitions.begin(tiny_export("x", *trunk, *made, validate, **configured), now=1.0)


def event(record: ExportRecord, task: str, kind: EventKind = EventKind.SUCCEEDED, **more: Any) -> Event:
    attempt = record.task(task).attempt
    if kind is EventKind.SUCCEEDED:
        calibrated = "-c" if "calibration" in attempt.inputs else ""
        more.setdefault(
            "outputs", {"validation" if task == "validate" else "model": f"sha256:{task}-{attempt.number}{calibrated}"}
        )
    return Event(kind=kind, time=2.0, task=task, attempt=attempt.number, **more)


def succeed(record: ExportRecord, *tasks: str) -> ExportRecord:
    for task in tasks:
        record = restored(transitions.apply(record, event(record, task)))
    return record


def restored(record: ExportRecord) -> ExportRecord:
    """What another process reads after a restart."""
    again = ExportRecord.from_json(record.to_json())
    assert again == record
    return again


def fail(record: ExportRecord, task: str, reason: str) -> ExportRecord:
    failed = event(record, task, EventKind.FAILED, failure=Failure(reason=reason, message="it failed"))
    record = transitions.apply(record, failed)
    found = decide(record, record.task(task), rules=default_rules(), alone=True)
    if found["next"] is not None:
        return transitions.retry(record, task, NextAttempt.model_validate(found["next"]), now=3.0)
    return transitions.give_up(record, task, Failure.from_json(found["failure"]), now=3.0)


def judge(record: ExportRecord, *failed: str, coarse: tuple[str, ...] = ()) -> ExportRecord:
    outputs: dict[str, Any] = {
        name: {"explanation": "too far", "fit": "failed", "worst_modules": ["layers.1.mlp.down_proj"]}
        for name in failed
    }
    outputs |= {name: {"failed_checks": 0, "fit": "warning", "fit_said": "it keeps 81 %"} for name in coarse}
    verdict = event(record, "validate", facts={"failed_outputs": list(failed), "outputs": outputs})
    rejected = gate.find_rejected(record, verdict)
    decided = {}
    for name, failure in rejected.items():
        task = record.task(name).with_attempt(state=TaskState.FAILED, failure=failure)
        found = decide(record, task, rules=default_rules(), alone=True)["next"]
        if found is not None:
            decided[name] = (failure, NextAttempt.model_validate(found))
    if not decided:
        return restored(transitions.apply(record, verdict))
    return restored(transitions.make_again(record, verdict, decided))


def states(record: ExportRecord) -> list[TaskState]:
    return [record.task(name).state for name in (TEXT, CALIBRATE)]


def asked_for() -> ExportRecord:
    """One of the outputs fails: it asks for the calibration, before smaller groups are tried."""
    return judge(succeed(begun(), "merge", "pytorch", "onnx"), "pytorch-int4")


def test_what_nobody_asks_for_is_skipped_and_the_export_succeeds() -> None:
    record = succeed(begun(), "merge")
    assert states(record) == [TaskState.SKIPPED, TaskState.SKIPPED]
    record = judge(succeed(record, "pytorch", "onnx"))
    assert record.state is ExportState.SUCCEEDED
    assert not record.task(CALIBRATE).attempts


def test_the_calibration_runs_for_the_output_that_asks_for_it() -> None:
    record = asked_for()
    assert states(record) == [TaskState.QUEUED, TaskState.WAITING]
    waiting = record.task("pytorch")
    assert (waiting.state, waiting.attempt.state) == (TaskState.WAITING, TaskState.WAITING)
    record = succeed(record, TEXT, CALIBRATE)
    attempt = record.task("pytorch").attempt
    assert (attempt.state, attempt.rule) == (TaskState.QUEUED, "quantize-rejected-calibrated")
    assert attempt.inputs["calibration"] == f"sha256:{CALIBRATE}-1"
    assert attempt.inputs["model"] == "sha256:merge-1"
    assert attempt.params["group_size"] == 32, "the calibration is for the groups of the plan"
    assert "calibration" not in record.task("onnx").inputs
    record = judge(succeed(record, "pytorch"))
    assert record.state is ExportState.SUCCEEDED
    assert record.outputs["pytorch-int4"] == "sha256:pytorch-2-c"


def test_an_output_that_passes_with_a_warning_is_calibrated_once() -> None:
    record = judge(succeed(begun(), "merge", "pytorch", "onnx"), coarse=("onnx-int4",))
    assert states(record) == [TaskState.QUEUED, TaskState.WAITING]
    assert record.task("pytorch").state is TaskState.SUCCEEDED
    (first, _) = record.task("onnx").attempts
    assert first.failure is not None
    assert (first.failure.reason, first.failure.message) == (
        "TOO_COARSE",
        "onnx-int4 passed with a warning: it keeps 81 %",
    )
    record = succeed(record, TEXT, CALIBRATE)
    attempt = record.task("onnx").attempt
    assert (attempt.rule, attempt.inputs["calibration"]) == ("quantize-rejected-calibrated", f"sha256:{CALIBRATE}-1")
    record = judge(succeed(record, "onnx"), coarse=("onnx-int4",))  # nothing better is known
    assert record.state is ExportState.SUCCEEDED
    assert record.outputs["onnx-int4"] == "sha256:onnx-2-c"


def test_what_the_validation_records_says_which_output_keeps_too_little() -> None:
    fit = Verdict(answer=Answer.WARNING, said="it keeps 81 %")
    output = OutputValidation(name="onnx-int4", format="onnx", level="int4", status=OutputStatus.PASSED, fit=fit)
    record = succeed(begun(), "merge", "pytorch", "onnx")
    verdict = event(record, "validate", facts={"failed_outputs": [], "outputs": {"onnx-int4": _summary(output)}})
    (failure,) = gate.find_rejected(record, verdict).values()
    assert (failure.reason, failure.message) == ("TOO_COARSE", "onnx-int4 passed with a warning: it keeps 81 %")


def test_one_that_fails_and_one_that_warns_share_a_calibration() -> None:
    record = judge(succeed(begun(), "merge", "pytorch", "onnx"), "pytorch-int4", coarse=("onnx-int4",))
    record = succeed(record, TEXT, CALIBRATE)
    rules = [record.task(name).attempt.rule for name in ("pytorch", "onnx")]
    assert rules == ["quantize-rejected-calibrated", "quantize-rejected-calibrated"]
    assert len(record.task(CALIBRATE).attempts) == 1


def test_without_a_calibration_the_output_with_a_warning_is_delivered() -> None:
    record = judge(succeed(begun(), "merge", "pytorch", "onnx"), coarse=("onnx-int4",))
    record = fail(succeed(record, TEXT), CALIBRATE, "CALIBRATION_UNSUPPORTED")
    assert "calibration" not in record.task("onnx").attempt.inputs
    record = judge(succeed(record, "onnx"), coarse=("onnx-int4",))
    assert record.state is ExportState.SUCCEEDED
    assert record.outputs["onnx-int4"] == "sha256:onnx-2"


@pytest.mark.parametrize(
    "settings",
    [{"validation": {"on_failure": "keep"}}, {"optimization": {"method": "rtn"}}],
    ids=["kept", "method chosen"],
)
def test_what_was_chosen_is_not_made_again_for_a_warning(settings: dict[str, Any]) -> None:
    record = succeed(begun(**settings), "merge", "pytorch", "onnx")
    record = judge(record, coarse=("onnx-int4",))
    assert record.state is ExportState.SUCCEEDED
    assert record.outputs["onnx-int4"] == "sha256:onnx-1"


def test_an_output_that_asks_later_takes_the_calibration_that_is_there() -> None:
    record = judge(succeed(asked_for(), TEXT, CALIBRATE, "pytorch"), "onnx-int4")
    attempt = record.task("onnx").attempt
    assert (attempt.state, attempt.rule) == (TaskState.QUEUED, "quantize-rejected-calibrated")
    assert attempt.inputs["calibration"] == f"sha256:{CALIBRATE}-1"
    assert len(record.task(CALIBRATE).attempts) == 1


def test_mixed_precision_and_wider_levels_follow() -> None:
    record = succeed(asked_for(), TEXT, CALIBRATE, "pytorch")
    rules = []
    for _ in range(3):
        record = judge(record, record.task("pytorch").format)
        rules.append((record.task("pytorch").attempt.rule, "calibration" in record.task("pytorch").attempt.inputs))
        record = succeed(record, "pytorch")
    assert rules == [
        ("quantize-rejected-mixed", True),
        ("quantize-rejected-int8", False),
        ("quantize-rejected-bf16", False),
    ]
    assert record.task("pytorch").format == "pytorch-bf16"


@pytest.mark.parametrize("lost", [TEXT, CALIBRATE])
def test_a_calibration_that_fails_leads_to_the_next_rule(lost: str) -> None:
    record = asked_for()
    record = succeed(record, TEXT) if lost == CALIBRATE else record
    record = fail(record, lost, "CALIBRATION_UNSUPPORTED")
    attempt = record.task("pytorch").attempt
    assert (attempt.state, "calibration" in attempt.inputs) == (TaskState.QUEUED, False)
    record = judge(succeed(record, "pytorch"), "pytorch-int4")
    assert record.task("pytorch").attempt.rule == "quantize-rejected-groups-of-16"
    record = judge(succeed(record, "pytorch"), "pytorch-int4")
    assert record.task("pytorch").attempt.rule == "quantize-rejected-mixed"
    assert any(warning.startswith(f"{lost}: it failed") for warning in record.warnings)
    record = judge(succeed(record, "pytorch"))
    assert record.state is ExportState.SUCCEEDED


def test_a_cancelled_export_ends_while_its_calibration_waits() -> None:
    record = transitions.cancel(asked_for(), now=3.0)
    assert record.state is ExportState.CANCELLED
    assert record.task("pytorch").attempt.state is TaskState.CANCELLED


def test_a_retry_begins_with_the_plan() -> None:
    stopped = transitions.stop(asked_for(), Failure(reason="INTERNAL", message="oops"), now=4.0)
    record = transitions.begin(transitions.restart(stopped), now=5.0)
    assert states(record) == [TaskState.SKIPPED, TaskState.SKIPPED]
    assert "calibration" not in record.task("pytorch").inputs
    assert record.task("pytorch").attempt.params["group_size"] == 32
    assert judge(succeed(record, "pytorch")).state is ExportState.SUCCEEDED


def test_a_program_that_loses_what_is_in_reserve_ends_the_export_all_the_same() -> None:
    """One of the version before reads the record without the field, and writes it so."""
    data = succeed(begun(), "merge").to_json()
    for task in data["tasks"]:
        del task["reserve"]
    record = succeed(ExportRecord.from_json(data), "pytorch", "onnx")
    for _ in range(2):
        record = succeed(judge(record, "pytorch-int4"), "pytorch")
    assert record.task("pytorch").attempt.rule == "quantize-rejected-mixed"
    assert judge(record).state is ExportState.SUCCEEDED
