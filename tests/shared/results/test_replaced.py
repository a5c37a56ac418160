"""The result says what was asked for, what is delivered and why; an output that is kept in spite of its verdict is no success in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.errors import ValidationError
from slipway.results.outcome import export_failure, failed_formats, recorded_failure, requested_formats
from slipway.results.report.card import model_card
from slipway.results.report.document import Report
from slipway.results.report.page import page
from slipway.results.result import replacements
from slipway.rpc.values import status_of, struct_of
from slipway.validation.survival import AdapterSurvival, ModuleSurvival
from slipway_protos.v1 import configuration_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.commands.report_parts import output, result, validation

FAILURE = ValidationError("onnx-int4 failed validation: mean_kl is 0.05", reason="VALIDATION_FAILED").failure()


def replaced_task(**changes: object) -> pb.Task:
    first = pb.Attempt(number=1, state=pb.TASK_STATE_FAILED, error=status_of(FAILURE))
    second = pb.Attempt(number=2, state=pb.TASK_STATE_SUCCEEDED, rule="by-rule", note="it has 8 bits")
    values: dict[str, object] = {
        "id": "quantize-onnx-int4",
        "stage": "quantize",
        "format": "onnx-int8",
        "requested_format": "onnx-int4",
        "state": pb.TASK_STATE_SUCCEEDED,
        "attempts": [first, second],
    }
    return pb.Task(**{**values, **changes})  # type: ignore[arg-type]


def test_what_was_asked_for_what_is_delivered_and_why() -> None:
    export = pb.Export(tasks=[replaced_task()])
    assert list(requested_formats(export)) == ["onnx-int4"]
    assert replacements(export) == {
        "onnx-int8": "onnx-int4 failed validation (mean_kl is 0.05) and was made again: it has 8 bits (by-rule); delivered as onnx-int8"
    }
    assert failed_formats(export) == {}
    same = pb.Export(tasks=[replaced_task(format="onnx-int4", requested_format="")])
    assert replacements(same)["onnx-int4"].endswith("delivered under the same name")


def test_a_replacement_that_failed_too_is_missing_under_the_name_that_was_asked_for() -> None:
    export = pb.Export(tasks=[replaced_task(state=pb.TASK_STATE_FAILED)])
    assert list(failed_formats(export)) == ["onnx-int4"]


def validated_export(name: str, stage: str = "quantize", *, on_failure: str = "keep", **facts: object) -> pb.Export:
    """An ended export with one output, which failed validation."""
    said = {"failed_outputs": [name], "outputs": {name: {"explanation": "too far", **facts}}}
    made = pb.Task(id=name, stage=stage, format=name, state=pb.TASK_STATE_SUCCEEDED)
    judged = pb.Task(id="validate", format="validation", facts=struct_of(said), state=pb.TASK_STATE_SUCCEEDED)
    settings = configuration_pb2.ValidationConfiguration(on_failure=on_failure)
    configuration = configuration_pb2.ExportConfiguration(validation=settings)
    return pb.Export(tasks=[made, judged], state=pb.EXPORT_STATE_SUCCEEDED, configuration=configuration)


def test_a_kept_output_is_a_warning_and_no_failure() -> None:
    failed = validation(output("onnx-int4", 0.4))
    found = recorded_failure(validated_export("onnx-int4", on_failure="fail", failed_checks=1))
    assert found is not None
    assert found.reason == "VALIDATION_FAILED"
    assert export_failure(validated_export("onnx-int4", on_failure="fail"), failed) is not None
    assert recorded_failure(validated_export("onnx-int4", failed_checks=1)) is None
    assert export_failure(validated_export("onnx-int4"), failed) is None
    html = page(Report.of(result(failed, ("onnx-int4",)), validation=failed, lineage=None))
    assert "onnx-int4 failed validation and was kept" in html
    assert "Every output passed" not in html
    both = validation(output("onnx-int4", 0.4), output("pytorch-int4", 0.4))
    html = page(Report.of(result(both, ("onnx-int4", "pytorch-int4")), validation=both, lineage=None))
    assert "onnx-int4, pytorch-int4 failed validation and were kept" in html


@pytest.mark.parametrize(
    ("name", "stage", "crashed"),
    [("pytorch", "merge", False), ("onnx", "onnx_export", False), ("onnx-int4", "quantize", True)],
)
def test_only_a_quantized_output_that_exceeds_its_limits_is_kept(name: str, stage: str, crashed: bool) -> None:
    failed = output(name, 0.4).model_copy(update={"checks": ()} if crashed else {})
    export = validated_export(name, stage, failed_checks=len(failed.failed_checks))
    for failure in (recorded_failure(export), export_failure(export, validation(failed))):
        assert failure is not None
        assert failure.reason == "VALIDATION_FAILED"
        assert failure.about["outputs"] == name


def test_the_page_shows_the_adapter_in_each_layer_and_the_worst_modules() -> None:
    modules = tuple(
        ModuleSurvival(
            module=f"model.layers.{layer}.q_proj",
            layer=layer,
            strength=0.0 if layer == 5 else 0.99,
            noise=0.001,
            cosine=0.9,
            changed=0.5,
            weight_error=0.08,
            fault="has lost the adapter" if layer == 5 else "",
        )
        for layer in range(12)
    )
    survival = AdapterSurvival(modules=modules)
    report = validation(output("onnx-int4", 0.4).model_copy(update={"survival": survival}), output("onnx"))
    html = page(Report.of(result(report, ("onnx", "onnx-int4")), validation=report, lineage=None))
    assert html.count("<circle") == 12
    assert html.count('<circle class="bar bad"') == 1
    assert "model.layers.5.q_proj" in html
    assert "model.layers.4.q_proj" not in html, "only those that fail"


def test_the_card_says_it(tmp_path: Path) -> None:
    report = validation(output("onnx-int8"))
    found = result(report, ("onnx-int8",))
    formats = {"onnx-int8": found.formats["onnx-int8"].model_copy(update={"replaced": "asked for as onnx-int4"})}
    card = model_card(
        Report.of(found.model_copy(update={"formats": formats}), validation=report, lineage=None), tmp_path
    )
    assert "**onnx-int8:** asked for as onnx-int4." in card
