"""The model card's evaluation: the signed table, and the metadata as ``huggingface_hub`` reads it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard

from slipway.results.report import write_report
from slipway.validation.answers import AnswerComparison, Score
from slipway.validation.comparisons import Check
from slipway.validation.findings import ValidationReport
from support.commands.report_parts import LINEAGE, comparison, not_run, output, result, validation

HELD_OUT = {**LINEAGE, "sources": {**LINEAGE["sources"], "heldout": "sha256:" + "3" * 64}}


def card(folder: Path, found: ValidationReport | None, names: tuple[str, ...], **more: object) -> ModelCard:
    write_report(folder, result=result(found, names, **more), validation=found, lineage=HELD_OUT)
    return ModelCard.load(folder / "README.md")


def test_the_hub_reads_the_metrics_of_what_passed(tmp_path: Path) -> None:
    found = validation(output("onnx"), output("onnx-int4", 0.4), output("pytorch", 0.0), not_run("tensorrt"))
    read = card(tmp_path, found, ("onnx", "onnx-int4", "pytorch", "tensorrt")).data
    assert read.model_name == "qwen3-finetuned"
    assert {type(each) for each in read.eval_results} == {EvalResult}
    metrics = {each.metric_name: each.metric_value for each in read.eval_results}
    assert metrics["Mean KL divergence from the reference (onnx)"] == 0.004
    assert metrics["Perplexity (pytorch)"] == 76.4
    assert not any("int4" in name or "tensorrt" in name for name in metrics)
    first = read.eval_results[0]
    assert (first.task_type, first.dataset_type) == ("text-generation", "held-out-text")
    assert first.dataset_revision == "sha256:" + "3" * 64
    assert first.dataset_args["samples"] == 10


def test_perplexity_of_the_built_in_text_is_no_quality(tmp_path: Path) -> None:
    found = validation(output("onnx"))
    inputs = found.inputs.model_copy(update={"held_out": False, "text_source": "built-in text, which"})
    read = card(tmp_path, found.model_copy(update={"inputs": inputs}), ("onnx",)).data
    assert {each.metric_type for each in read.eval_results} == {"mean_kl", "top1_agreement", "as_expected"}
    assert read.eval_results[0].dataset_revision is None


def test_a_figure_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    odd = output("onnx").model_copy(update={"answers": None, "perplexity": None, "to_reference": comparison(None)})
    read = card(tmp_path, validation(odd), ("onnx",)).data
    assert {each.metric_type for each in read.eval_results} == {"top1_agreement"}
    assert all(math.isfinite(each.metric_value) for each in read.eval_results)


@pytest.mark.parametrize("found", [None, validation(output("onnx", 0.4)), validation(not_run("onnx"))])
def test_without_an_output_that_passed_there_is_no_metadata(tmp_path: Path, found: ValidationReport | None) -> None:
    read = card(tmp_path, found, ("onnx",))
    assert read.data.eval_results is None
    assert "model-index" not in read.content


def test_the_table_is_signed_if_every_limit_was_kept(tmp_path: Path) -> None:
    text = card(tmp_path, validation(output("onnx"), not_run("tensorrt")), ("onnx", "tensorrt")).text
    assert "| onnx | Mean KL divergence | 0.004 | at most 0.02 | passed |" in text
    said = "Signed off by Slipway 0.1.0 on 2026-11-21 for export abc123: onnx kept the 1 limit. Not run: tensorrt."
    assert said in text


def test_the_table_is_not_signed_otherwise(tmp_path: Path) -> None:
    text = card(tmp_path, validation(output("onnx"), output("onnx-int4", 0.4)), ("onnx", "onnx-int4")).text
    assert "| onnx-int4 | Mean KL divergence | 0.4 | at most 0.02 | failed |" in text
    assert "Not signed off: onnx-int4 did not keep every limit." in text
    assert "Signed off by" not in text


def test_an_output_that_crashed_is_not_said_to_exceed_limits(tmp_path: Path) -> None:
    crashed = output("onnx-int8", 0.4).model_copy(update={"checks": ()})
    text = card(tmp_path, validation(output("onnx-int4", 0.4), crashed), ("onnx-int4", "onnx-int8")).text
    assert "Not signed off: onnx-int4 did not keep every limit; onnx-int8 failed to run." in text
    text = card(tmp_path, validation(crashed), ("onnx-int8",)).text
    assert "Not signed off: onnx-int8 failed to run." in text


def test_the_name_of_a_measure_is_text_and_no_markup(tmp_path: Path) -> None:
    check = Check(name="answers.<b>|x_loss", value=0.0, limit=0.1, comparison="<=", passed=True)
    text = card(tmp_path, validation(output("onnx").model_copy(update={"checks": (check,)})), ("onnx",)).text
    (line,) = [line for line in text.splitlines() if "on the test inputs |" in line]
    assert "<b>" not in line
    assert re.search(r"(?<!\\)\|x", line) is None


def test_scores_of_test_inputs_are_a_data_set_of_their_own(tmp_path: Path) -> None:
    scores = (Score(name="accuracy", value=0.9, reference=0.92), Score(name="f1", value=None, reference=None))
    answers = AnswerComparison(inputs=50, with_expected=50, agreement=0.96, scores=scores)
    check = Check(name="answers.accuracy_loss", value=0.02, limit=0.07, comparison="<=", passed=True, unit="share")
    made = output("onnx")
    made = made.model_copy(update={"answers": answers, "checks": (*made.checks, check)})
    found = card(tmp_path, validation(made), ("onnx",))
    (metric,) = [each for each in found.data.eval_results if each.dataset_type == "test-inputs"]
    assert "&id" not in found.content  # not every reader of YAML knows references
    assert (metric.metric_type, metric.metric_value, metric.metric_name) == ("accuracy", 0.9, "accuracy (onnx)")
    assert "| onnx | Loss of accuracy on the test inputs | 2.00 % | at most 7.00 % | passed |" in found.text
