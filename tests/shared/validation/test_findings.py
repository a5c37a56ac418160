"""The validation report: its verdict, and writing and reading it."""

import json
import math

import pytest

from slipway.validation.comparisons import Check, LogitComparison
from slipway.validation.findings import OutputStatus, OutputValidation, Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine

ENGINE = Engine(runtime="transformers", version="5", stored_dtype="float32", compute_dtype="float32")
INPUTS = ValidationInputs(
    samples=2,
    sequence_length=8,
    tokens=16,
    requested_samples=2,
    vocabulary=11,
    seed=0,
    prompts=1,
    new_tokens=4,
    text_source="test",
    held_out=True,
)


def report(*statuses: OutputStatus) -> ValidationReport:
    outputs = tuple(
        OutputValidation(name=f"onnx-{index}", format="onnx", status=status) for index, status in enumerate(statuses)
    )
    return ValidationReport(
        reference=Reference(description="base + adapter", engine=ENGINE), inputs=INPUTS, outputs=outputs
    )


@pytest.mark.parametrize(
    ("statuses", "passed"),
    [
        ((OutputStatus.PASSED, OutputStatus.PASSED), True),
        ((OutputStatus.PASSED, OutputStatus.NOT_RUN), True),
        ((OutputStatus.PASSED, OutputStatus.FAILED), False),
        ((OutputStatus.NOT_RUN,), False),
        ((), False),
    ],
)
def test_verdict_counts_only_what_ran(statuses: tuple[OutputStatus, ...], passed: bool) -> None:
    assert report(*statuses).passed is passed


def test_names_by_status() -> None:
    found = report(OutputStatus.PASSED, OutputStatus.FAILED, OutputStatus.NOT_RUN)
    assert found.failed_outputs == ("onnx-1",)
    assert found.not_run_outputs == ("onnx-2",)
    assert found.output("onnx-2").passed is False
    with pytest.raises(KeyError):
        found.output("pytorch")


def test_written_report_reads_back_equal(tmp_path) -> None:
    before = report(OutputStatus.PASSED, OutputStatus.FAILED)
    before.write(tmp_path)
    assert ValidationReport.read(tmp_path) == before
    assert json.loads((tmp_path / "validation.json").read_text())["passed"] is False


def test_not_finite_figures_are_written_as_null() -> None:
    values = LogitComparison(tokens=1, max_abs_diff=math.nan, mean_abs_diff=math.inf, mean_kl=0.5, max_kl=0.5)
    text = values.model_dump_json()
    assert json.loads(text)["max_abs_diff"] is None
    assert json.loads(text)["mean_abs_diff"] is None
    assert LogitComparison.model_validate_json(text).mean_kl == 0.5


def test_check_says_value_and_limit() -> None:
    check = Check(name="mean_kl", value=0.5, limit=0.02, comparison="<=", passed=False)
    assert str(check) == "mean_kl (against reference) is 0.5, limit <= 0.02"
    assert "not a finite number" in str(check.model_copy(update={"value": None}))
