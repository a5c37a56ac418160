"""The result of an export: what was made and how, what failed and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore
from slipway.errors import Failure
from slipway.results.delivery import lineage
from slipway.results.outcome import export_failure, export_result, recorded_failure
from slipway.rpc.values import status_of, struct_of
from slipway.validation.findings import OutputStatus, OutputValidation, Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine
from slipway_protos.v1 import export_pb2 as pb


def report(*outputs: OutputValidation) -> ValidationReport:
    reference = Reference(description="base + adapter", engine=Engine(runtime="transformers"))
    inputs = ValidationInputs(
        samples=1,
        sequence_length=8,
        tokens=8,
        requested_samples=1,
        vocabulary=64,
        seed=0,
        prompts=0,
        new_tokens=0,
        text_source="test",
        held_out=True,
    )
    return ValidationReport(reference=reference, inputs=inputs, outputs=outputs)


def test_the_result_says_what_was_made_and_how(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    passed = [OutputValidation(name=name, format="pytorch", status=OutputStatus.PASSED) for name in export.outputs]
    result = export_result(
        export, store=store, validation=report(*passed), output_directory=tmp_path / "out", warnings=["skipped one"]
    )
    assert result.success
    assert result.validation_passed
    assert result.error_message == ""
    assert result.paths == {name: str(tmp_path / "out" / name) for name in ("pytorch", "pytorch-int4")}
    assert result.original_size_bytes == result.formats["pytorch"].size_bytes
    assert result.optimized_size_bytes == result.formats["pytorch-int4"].size_bytes
    assert result.size_reduction_percent == pytest.approx(66.7, abs=0.1)
    assert result.warnings == ("skipped one", "merge: the change of 1 module is lost in rounding")
    first, second = result.attempts
    assert (first.outcome, first.reason, first.params) == ("failed", "OUT_OF_MEMORY", {"group_size": 64})
    assert (second.outcome, second.rule, second.params) == ("succeeded", "smaller", {"group_size": 32})
    assert json.loads(result.model_dump_json())["timestamp"] == "2026-01-02T03:04:05Z"


def test_an_output_that_fails_validation_fails_the_export(export: pb.Export, store: LocalStore) -> None:
    failed = OutputValidation(
        name="pytorch-int4",
        format="pytorch",
        status=OutputStatus.FAILED,
        explanation="mean KL is 0.4, limit 0.02",
        remedy="use int8",
    )
    failure = export_failure(export, report(failed))
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.remedy) == ("VALIDATION_FAILED", 4, "use int8")
    result = export_result(export, store=store, validation=report(failed))
    assert not result.success
    assert "pytorch-int4" in result.error_message
    assert "use int8" in result.error_message


def test_a_failed_export_keeps_its_reason(export: pb.Export, store: LocalStore) -> None:
    export.state = pb.EXPORT_STATE_FAILED
    export.error.CopyFrom(status_of(Failure("UNSUPPORTED", "no TensorRT", "pip install it", "TensorRTBuildError")))
    result = export_result(export, store=store)
    assert (result.success, result.reason, result.validation_passed) == (False, "UNSUPPORTED", None)
    assert "pip install it" in result.error_message


def test_an_attempt_that_failed_has_what_the_machine_had_left(export: pb.Export, store: LocalStore) -> None:
    left = {"machine_memory_available_bytes": "1500000000", "machine_memory_total_bytes": "8000000000"}
    about = {**left, "machine_scratch_free_bytes": "2000000000", "tensor": "w"}
    attempt = export.tasks[1].attempts[0]
    attempt.error.CopyFrom(status_of(Failure("OUT_OF_MEMORY", "too large", "use less", "StageError", about)))
    first, second = export_result(export, store=store).attempts
    assert first.machine == {
        "memory_available_bytes": 1_500_000_000,
        "memory_total_bytes": 8_000_000_000,
        "scratch_free_bytes": 2_000_000_000,
    }
    assert first.machine_left == "the machine had 1.5 GB of 8.0 GB memory available, 2.0 GB free for scratch"
    assert (second.machine, second.machine_left) == ({}, "")


def test_a_failed_validation_decides_over_a_format_that_cannot_be_made(export: pb.Export, store: LocalStore) -> None:
    export.state = pb.EXPORT_STATE_FAILED
    export.error.CopyFrom(status_of(Failure("UNSUPPORTED", "no TensorRT", "pip install it", "TensorRTBuildError")))
    wrong = OutputValidation(
        name="pytorch-int4",
        format="pytorch",
        status=OutputStatus.FAILED,
        explanation="mean KL is 0.4",
        remedy="use int8",
    )
    result = export_result(export, store=store, validation=report(wrong))
    assert (result.success, result.reason) == (False, "VALIDATION_FAILED")
    assert result.error_message == (
        "pytorch-int4 failed validation: mean KL is 0.4; in addition, UNSUPPORTED: no TensorRT; use int8"
    )


def test_each_of_many_failed_outputs_has_a_line_of_the_error(export: pb.Export, store: LocalStore) -> None:
    names = [f"pytorch-int{number}" for number in range(11)]
    wrong = [
        OutputValidation(
            name=name,
            format="pytorch",
            status=OutputStatus.FAILED,
            explanation=f"{name} is far\noff",
            remedy="use int8" if name != "pytorch-int0" else "smaller",
        )
        for name in names
    ]
    result = export_result(export, store=store, validation=report(*wrong))
    assert result.error_message.split("\n") == [
        "11 outputs failed validation",
        *(f"{name} failed validation: {name} is far off" for name in names),
        "smaller",
        "use int8",
    ]
    export.state = pb.EXPORT_STATE_FAILED
    export.error.CopyFrom(status_of(Failure("UNSUPPORTED", "no TensorRT", "pip install it", "TensorRTBuildError")))
    more = export_result(export, store=store, validation=report(*wrong)).error_message.split("\n")
    assert "in addition, UNSUPPORTED: no TensorRT" in more


def test_a_warning_is_given_once_with_all_its_tasks(export: pb.Export, store: LocalStore) -> None:
    """The coordinator also has the warnings of stages, and several stages may give the same warning."""
    lost = "the change of 1 module is lost in rounding"
    export.warnings.extend([lost, "skipped one"])
    export.tasks[1].facts.update({"warnings": [lost]})
    result = export_result(export, store=store, warnings=["skipped one", "skipped one"])
    merge, other = export.tasks[0].id, export.tasks[1].id
    assert result.warnings == ("skipped one", f"{merge}, {other}: {lost}")


def test_an_output_that_failed_validation_is_the_error_and_no_warning(export: pb.Export, store: LocalStore) -> None:
    failed = OutputValidation(
        name="pytorch-int4",
        format="pytorch",
        status=OutputStatus.FAILED,
        explanation="mean_kl is 0.4",
        remedy="smaller",
    )
    export.tasks[1].facts.update({"warnings": ["pytorch-int4 failed validation: mean_kl is 0.4; smaller"]})
    result = export_result(export, store=store, validation=report(failed))
    assert result.error_message.count("mean_kl is 0.4") == 1
    assert not any("mean_kl" in warning for warning in result.warnings)


def test_a_format_that_was_not_made_is_in_the_result_with_its_reason(export: pb.Export, store: LocalStore) -> None:
    error = status_of(Failure("OUT_OF_MEMORY", "too large"))
    attempts = [pb.Attempt(number=1, state=pb.TASK_STATE_FAILED, error=error)]
    export.tasks.add(id="onnx_export", format="onnx", state=pb.TASK_STATE_FAILED, attempts=attempts)
    inputs = {"model": "task:onnx_export/onnx"}
    export.tasks.add(id="quantize-onnx-int4", format="onnx-int4", state=pb.TASK_STATE_SKIPPED, inputs=inputs)
    result = export_result(export, store=store)
    assert result.requested == ("pytorch", "pytorch-int4", "onnx", "onnx-int4")
    onnx, int4 = result.failed["onnx"], result.failed["onnx-int4"]
    assert (onnx.state, onnx.reason, "too large" in onnx.error_message) == ("failed", "OUT_OF_MEMORY", True)
    assert (int4.state, int4.reason) == ("skipped", "OUT_OF_MEMORY")
    assert int4.error_message == "onnx_export, which it needs, failed"


def test_a_format_whose_graph_is_not_made_of_such_models_names_their_kind(export: pb.Export, store: LocalStore) -> None:
    error = status_of(Failure("FAMILY_UNSUPPORTED", "the model is encoder-decoder (MarianMTModel)"))
    attempts = [pb.Attempt(number=1, state=pb.TASK_STATE_FAILED, error=error)]
    export.tasks.add(id="onnx_export-tensorrt", state=pb.TASK_STATE_FAILED, attempts=attempts)
    inputs = {"onnx": "task:onnx_export-tensorrt/onnx"}
    export.tasks.add(id="tensorrt_build", format="tensorrt", state=pb.TASK_STATE_SKIPPED, inputs=inputs)
    found = export_result(export, store=store).failed["tensorrt"]
    assert (found.state, found.reason) == ("not_run", "FAMILY_UNSUPPORTED")
    assert found.error_message.startswith(
        "onnx_export-tensorrt, which it needs, was not run: the model is encoder-decoder"
    )


@pytest.mark.parametrize(
    "facts",
    [
        {"failed_outputs": ["onnx"], "outputs": ["onnx"]},
        {"failed_outputs": ["onnx"], "outputs": {"onnx": "bad"}},
        {"failed_outputs": [["onnx"]], "outputs": {"onnx": {"explanation": 1, "remedy": None}}},
        {"failed_outputs": "onnx"},
        {"urls": ["s3://a"]},
    ],
)
def test_facts_of_another_form_are_survived(export: pb.Export, facts: dict[str, Any]) -> None:
    state = pb.TASK_STATE_SUCCEEDED
    export.tasks.add(id="validate", stage="validate", format="validation", state=state, facts=struct_of(facts))
    export.tasks.add(id="import", stage="import", state=state, facts=struct_of(facts))
    failure = recorded_failure(export)
    assert (failure is not None) == isinstance(facts.get("failed_outputs"), list)
    assert failure is None or failure.reason == "VALIDATION_FAILED"
    assert "imported_from" not in lineage(export)


def test_a_cancelled_export_ends_as_cancelled() -> None:
    failure = recorded_failure(pb.Export(name="projects/p/exports/x", state=pb.EXPORT_STATE_CANCELLED))
    assert failure is not None
    assert (failure.reason, failure.exit_code) == ("CANCELLED", 130)
