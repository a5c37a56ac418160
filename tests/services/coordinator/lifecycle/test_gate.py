"""A quantized output that fails validation is made again by rule, under the name of the level it has, and only it is judged again."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.errors import Failure
from slipway_coordinator.lifecycle import gate, transitions
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState, TaskRecord, TaskState
from slipway_coordinator.lifecycle.recovery import NextAttempt
from slipway_coordinator.lifecycle.rules import default_rules
from slipway_coordinator.lifecycle.scheduling import AGAIN
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.workflow.workflow import decide
from support.coordinators.harness import tiny_export

WORST = ["model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj"]


def made_again(
    *levels: str, kind: str = "pytorch", on_failure: str = "fallback", max_attempts: int = 5, **params: Any
) -> ExportRecord:
    """Begin an export of one format at some levels, with a validation of all of them."""
    merge = TaskRecord(id="merge", stage="merge", params={}, inputs={"base": "source:base"}, format=kind)
    quantized = [
        TaskRecord(
            id=f"quantize-{level}",
            stage="quantize",
            params={"format": kind, "level": level, "group_size": 32, "packed": True, **params},
            inputs={"model": "task:merge/model"},
            format=f"{kind}-{level}",
        )
        for level in levels
    ]
    outputs = {kind: "task:merge/model", **{task.format: f"task:{task.id}/model" for task in quantized}}
    validate = TaskRecord(
        id="validate",
        stage="validate",
        params={"test_samples": 2},
        inputs={"base": "source:base", **outputs},
        format="validation",
        partial=True,
    )
    settings = {"validation": {"on_failure": on_failure}, "recovery": {"max_attempts": max_attempts}}
    export = tiny_export("x", merge, *quantized, validate, **settings)
    return succeed(transitions.begin(export, now=1.0), "merge", *(task.id for task in quantized))


def event_of(record: ExportRecord, task: str, **more: Any) -> Event:
    number = record.task(task).attempt.number
    more.setdefault("outputs", {"model" if task != "validate" else "validation": f"sha256:{task}-{number}"})
    return Event(kind=EventKind.SUCCEEDED, time=2.0, task=task, attempt=number, **more)


def succeed(record: ExportRecord, *tasks: str) -> ExportRecord:
    for task in tasks:
        record = transitions.apply(record, event_of(record, task))
    return record


def judge(record: ExportRecord, *failed: str, again: bool = True) -> ExportRecord:
    """Let the validation end with a verdict, as the workflow does."""
    outputs = {name: {"explanation": "too far", "mean_kl": 0.05, "worst_modules": WORST} for name in failed}
    warnings = [f"{name} failed validation: too far" for name in failed]
    facts = {"failed_outputs": list(failed), "outputs": outputs, "warnings": warnings}
    event = event_of(record, "validate", facts=facts)
    rejected = gate.find_rejected(record, event)
    decided = {}
    for name, failure in rejected.items():
        task = record.task(name).with_attempt(state=TaskState.FAILED, failure=failure)
        found = decide(record, task, rules=default_rules(), alone=True)["next"]
        if found is not None:
            decided[name] = (failure, NextAttempt.model_validate(found))
    assert bool(decided) is again
    return transitions.make_again(record, event, decided) if decided else transitions.apply(record, event)


def tried(record: ExportRecord, task: str) -> list[dict[str, Any]]:
    changed = ("level", "group_size", "keep")
    return [{name: each.params[name] for name in changed if name in each.params} for each in record.task(task).attempts]


def test_it_becomes_wider_step_by_step() -> None:
    record = made_again("int4")
    names = []
    for _ in range(4):
        record = judge(record, record.task("quantize-int4").format)
        record = succeed(record, "quantize-int4")
        names.append(record.task("quantize-int4").format)
    assert tried(record, "quantize-int4") == [
        {"level": "int4", "group_size": 32},
        {"level": "int4", "group_size": 16},
        {"level": "int4", "group_size": 16, "keep": WORST},
        {"level": "int8", "group_size": 32},
        {"level": "bf16", "group_size": 32},
    ]
    assert names == ["pytorch-int4", "pytorch-int4", "pytorch-int8", "pytorch-bf16"]
    record = judge(record, again=False)
    assert record.state is ExportState.SUCCEEDED
    assert list(record.outputs) == ["pytorch", "pytorch-bf16", "validation"]
    task = record.task("quantize-int4")
    assert task.requested == "pytorch-int4"
    assert [each.failure.reason if each.failure else "" for each in task.attempts] == ["VALIDATION_FAILED"] * 4 + [""]
    assert task.attempts[0].failure is not None
    assert task.attempts[0].failure.about["mean_kl"] == "0.05"
    assert "pytorch-int4" in task.attempts[0].failure.message
    assert "pytorch-int8" in task.attempts[3].failure.message  # type: ignore[union-attr]


def test_only_what_changed_is_judged_again() -> None:
    record = judge(made_again("int4", "int8"), "pytorch-int4")
    assert record.state is ExportState.RUNNING
    assert record.task("validate").state is TaskState.WAITING
    assert record.task("quantize-int8").state is TaskState.SUCCEEDED
    assert record.warnings == (), "what was made again has not failed yet"
    record = succeed(record, "quantize-int4")
    again = record.task("validate").attempt
    assert again.params == {"test_samples": 2, "again": ["pytorch-int4"]}
    assert again.inputs["before"] == "sha256:validate-1"
    assert again.inputs["pytorch-int4"] == "sha256:quantize-int4-2"
    assert again.inputs["pytorch-int8"] == "sha256:quantize-int8-1"
    assert again.rule == AGAIN


def test_a_level_that_is_delivered_anyway_is_not_made_twice() -> None:
    record = made_again("int4", "int8", "bf16")
    for _ in range(2):
        record = succeed(judge(record, "pytorch-int4"), "quantize-int4")
    record = judge(record, "pytorch-int4", again=False)
    assert record.state is ExportState.SUCCEEDED, "the verdict is in the result"
    assert "pytorch-int4" in record.outputs
    assert record.warnings == ("pytorch-int4 failed validation: too far",)


@pytest.mark.parametrize("on_failure", ["fail", "keep"])
def test_otherwise_the_verdict_is_only_a_result(on_failure: str) -> None:
    record = judge(made_again("int4", on_failure=on_failure), "pytorch-int4", again=False)
    assert record.state is ExportState.SUCCEEDED


def test_attempts_are_counted() -> None:
    record = succeed(judge(made_again("int4", max_attempts=2), "pytorch-int4"), "quantize-int4")
    assert judge(record, "pytorch-int4", again=False).state is ExportState.SUCCEEDED


def test_an_output_of_one_that_fails_itself_is_left_as_it_is() -> None:
    assert judge(made_again("int4"), "pytorch", "pytorch-int4", again=False).state is ExportState.SUCCEEDED


def test_a_cancelled_export_makes_nothing_again() -> None:
    record = made_again("int4")
    record = transitions.apply(record, event_of(record, "validate").model_copy(update={"kind": EventKind.LEASED}))
    record = transitions.cancel(record, now=2.0)
    assert judge(record, "pytorch-int4", again=False).state.ended


def test_a_replacement_that_cannot_be_made_leads_to_the_next_way() -> None:
    """Groups of 16 may not fit into memory, or a layer may refuse them: the wider level does."""
    record = judge(made_again("int4"), "pytorch-int4")
    oops = Failure(reason="QUANTIZATION_FAILED", message="does not load")
    event = event_of(record, "quantize-int4").model_copy(update={"kind": EventKind.FAILED, "failure": oops})
    record = transitions.apply(record, event)
    found = decide(record, record.task("quantize-int4"), rules=default_rules(), alone=True)["next"]
    record = transitions.retry(record, "quantize-int4", NextAttempt.model_validate(found), now=3.0)
    assert record.task("quantize-int4").attempt.rule == "quantize-rejected-mixed"
    assert record.task("quantize-int4").attempt.params["keep"] == WORST


def test_a_calibration_is_left_out_where_it_does_not_fit() -> None:
    """It is made for one number of bits and one group size, so its groups stay as they are, and a wider level is rounded without it."""
    record = made_again("int4")
    task = record.task("quantize-int4")
    task = task.with_attempt(inputs={**task.attempt.inputs, "calibration": "sha256:c"})
    record = succeed(judge(record.with_task(task), "pytorch-int4"), "quantize-int4")
    mixed = record.task("quantize-int4").attempt
    assert (mixed.rule, mixed.inputs["calibration"]) == ("quantize-rejected-mixed", "sha256:c")
    record = judge(record, "pytorch-int4")
    assert record.task("quantize-int4").attempt.rule == "quantize-rejected-int8"
    assert "calibration" not in record.task("quantize-int4").attempt.inputs


def test_graphs_have_another_type_of_16_bits() -> None:
    record = made_again("int8", kind="onnx")
    for _ in range(3):
        record = succeed(judge(record, record.task("quantize-int8").format), "quantize-int8")
    assert record.task("quantize-int8").attempt.params["level"] == "fp16"
    assert record.task("quantize-int8").format == "onnx-fp16"


def test_a_retry_begins_with_what_was_asked_for() -> None:
    record = made_again("int4")
    for _ in range(3):
        record = succeed(judge(record, record.task("quantize-int4").format), "quantize-int4")
    record = judge(record, "pytorch-int8")
    stopped = transitions.stop(record, Failure(reason="INTERNAL", message="oops"), now=4.0)
    again = transitions.begin(transitions.restart(stopped), now=5.0)
    task = again.task("quantize-int4")
    assert (task.format, task.requested) == ("pytorch-int4", "")
    assert task.attempt.params["level"] == "int4"
    assert set(again.task("validate").inputs) == {"base", "pytorch", "pytorch-int4"}


def test_an_output_of_an_earlier_run_that_is_rejected_now_is_the_first_of_this_run() -> None:
    record = made_again("int4")
    made = record.task("quantize-int4").with_attempt(inputs={"model": "sha256:m", "calibration": "sha256:c"})
    stopped = transitions.stop(record.with_task(made), Failure(reason="INTERNAL", message="oops"), now=4.0)
    again = transitions.begin(transitions.restart(stopped), now=5.0)
    record = judge(again, "pytorch-int4")
    assert tried(record, "quantize-int4")[1] == {"level": "int4", "group_size": 32, "keep": WORST}


def test_an_output_that_could_not_be_run_is_not_rejected() -> None:
    record = made_again("int4")
    for checks, count in ((0, 0), (2, 1), (None, 1)):
        facts = {"failed_outputs": ["pytorch-int4"], "outputs": {"pytorch-int4": {"failed_checks": checks}}}
        assert len(gate.find_rejected(record, event_of(record, "validate", facts=facts))) == count


def test_the_warning_of_a_rule_is_kept() -> None:
    record = made_again("int4")
    event = event_of(record, "validate")
    following = NextAttempt(rule="r", note="", params={}, resources={}, warning="made otherwise")
    record = transitions.make_again(
        record, event, {"quantize-int4": (Failure(reason="VALIDATION_FAILED", message="too far"), following)}
    )
    assert record.warnings == ("made otherwise",)


def test_facts_of_another_version_decide_nothing() -> None:
    record = made_again("int4")
    for facts in (
        {"failed_outputs": "pytorch-int4"},
        {"failed_outputs": ["pytorch-int4"], "outputs": {"pytorch-int4": 3}},
    ):
        assert gate.find_rejected(record, event_of(record, "validate", facts=facts)) == {}


def test_a_wider_type_of_gguf_is_delivered_under_its_name() -> None:
    record = one_format("gguf", ("gguf-iq4_xs", "gguf", {"type": "iq4_xs"}), ("gguf-q8_0", "gguf", {"type": "q8_0"}))
    names = []
    for _ in range(3):
        record = succeed(judge(record, record.task("gguf-iq4_xs").format), "gguf-iq4_xs")
        names.append(record.task("gguf-iq4_xs").format)
    assert names == ["gguf-q4_k_m", "gguf-q6_k", "gguf-bf16"], "another task delivers q8_0"
    assert [each.params["type"] for each in record.task("gguf-iq4_xs").attempts] == ["iq4_xs", "q4_k_m", "q6_k", "bf16"]
    assert judge(record, "gguf-bf16", again=False).state is ExportState.SUCCEEDED


def test_smaller_groups_are_all_that_a_program_of_executorch_has() -> None:
    record = one_format("executorch", ("executorch-8da4w", "executorch", {"level": "8da4w", "group_size": 128}))
    record = succeed(judge(record, "executorch-8da4w"), "executorch-8da4w")
    assert record.task("executorch-8da4w").attempt.params["group_size"] == 32
    record = judge(record, "executorch-8da4w", again=False)
    assert record.state is ExportState.SUCCEEDED
    assert record.warnings == ("executorch-8da4w failed validation: too far",)


def test_weights_that_another_task_converts_are_rounded_again() -> None:
    """The task that rounds delivers nothing itself, so its output keeps its level."""
    record = one_format("openvino", ("openvino-int4", "openvino", {"level": "int4"}), rounding={"format": "onnx", "level": "int4", "group_size": 32, "packed": True})  # fmt: skip
    for number, changed in enumerate(({"group_size": 16}, {"keep": WORST}), start=2):
        record = judge(record, "openvino-int4")
        assert record.warnings == (), "what was made again has not failed yet"
        assert [record.task(name).state for name in ("openvino-int4", "validate")] == [TaskState.WAITING] * 2
        record = succeed(record, "rounded")
        assert record.task("rounded").attempt.params.items() >= changed.items()
        assert record.task("openvino-int4").attempt.inputs == {"onnx": f"sha256:rounded-{number}"}
        record = succeed(record, "openvino-int4")
        assert record.task("validate").attempt.params["again"] == ["openvino-int4"]
    record = judge(record, "openvino-int4", again=False)
    assert record.state is ExportState.SUCCEEDED
    assert set(record.outputs) == {"openvino", "openvino-int4", "validation"}
    rejected = record.task("rounded").attempts[0].failure
    assert rejected is not None
    assert rejected.about["output"] == "openvino-int4"


@pytest.mark.parametrize(
    ("kind", "name", "params"),
    [
        ("gguf", "gguf", {"type": "f16"}),
        ("adapter", "adapter-onnx", {"target": "onnx"}),
        ("gguf_adapter", "adapter-gguf", {"name": "tiny"}),
        ("torchscript", "torchscript-bf16", {"level": "bf16"}),
        ("torch_export", "torch_export-bf16", {"level": "bf16"}),
        ("openvino", "openvino-fp16", {"level": "fp16"}),
        ("executorch", "executorch", {"level": "none"}),
        ("litert", "litert-int8", {"level": "int8"}),
    ],
)
def test_what_no_rule_makes_better_ends_with_its_verdict(kind: str, name: str, params: dict[str, Any]) -> None:
    record = judge(one_format("pytorch", (name, kind, params)), name, again=False)
    assert record.state is ExportState.SUCCEEDED
    assert name in record.outputs
    assert record.warnings == (f"{name} failed validation: too far",)


def one_format(
    kind: str, *outputs: tuple[str, str, dict[str, Any]], rounding: dict[str, Any] | None = None
) -> ExportRecord:
    """Begin an export of outputs, each with its stage and parameters; all of them are made of one that was rounded, if it was."""
    merge = TaskRecord(id="merge", stage="merge", params={}, inputs={"base": "source:base"}, format=kind)
    source, before = "task:merge/model", []
    if rounding:
        before = [TaskRecord(id="rounded", stage="quantize", params=rounding, inputs={"model": source})]
        source = "task:rounded/model"
    made = [
        TaskRecord(id=name, stage=stage, params=params, inputs={"onnx": source}, format=name)
        for name, stage, params in outputs
    ]
    inputs = {kind: "task:merge/model", **{task.format: f"task:{task.id}/model" for task in made}}
    validate = TaskRecord(
        id="validate", stage="validate", params={}, inputs={"base": "source:base", **inputs}, format="validation", partial=True
    )  # fmt: skip
    export = tiny_export("x", merge, *before, *made, validate, validation={"on_failure": "fallback"})
    names = ("merge", *(task.id for task in (*before, *made)))
    return succeed(transitions.begin(export, now=1.0), *names)
