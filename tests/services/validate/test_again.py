"""A validation that runs again keeps the verdicts on what did not change, and judges the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.stage import Context
from slipway.validation.findings import ValidationReport
from slipway_validate.params import ValidateParams
from slipway_validate.stage import STAGE
from slipway_validate.validation import earlier_verdicts
from support.commands.report_parts import output, validation
from support.models.validation_models import Models

OUTPUTS = ["pytorch", "pytorch-int4", "pytorch-int8"]


def test_verdicts_on_what_changed_or_is_gone_are_not_kept(tmp_path: Path) -> None:
    validation(output("pytorch"), output("pytorch-int4"), output("onnx")).write(tmp_path)
    inputs = {"before": tmp_path}
    kept = earlier_verdicts(inputs, ValidateParams(again=("pytorch-int4",)), OUTPUTS)
    assert list(kept) == ["pytorch"], "int4 changed, int8 is new, onnx is gone"
    assert earlier_verdicts(inputs, ValidateParams(), OUTPUTS) == {}
    (tmp_path / "validation.json").write_text("{}")
    assert earlier_verdicts(inputs, ValidateParams(again=()), OUTPUTS) == {}, "then all are judged again"


@pytest.mark.slow
def test_the_stage_judges_only_what_changed(tiny: Models, held_out: Path, tmp_path: Path) -> None:
    params = {"sequence_length": 24, "test_samples": 2, "benchmark_performance": False, "greedy_prompts": 0}
    inputs = {"base": tiny.base, "adapter": tiny.adapter, "heldout": held_out, "pytorch": tiny.merged}
    inputs |= {"pytorch-bad": tiny.without_adapter("again-bad"), "pytorch-worse": tiny.scaled("again-worse", 2.0)}
    contexts = [Context(workdir=tmp_path / name) for name in ("first", "second")]
    for context in contexts:
        context.workdir.mkdir()
    first = STAGE.run(inputs, ValidateParams(**params), contexts[0])["validation"]
    found = ValidationReport.read(first)
    assert found.failed_outputs == ("pytorch-bad", "pytorch-worse")
    better = {**inputs, "before": first, "pytorch-bad": tiny.copied("again-good")}
    second = STAGE.run(better, ValidateParams(**params, again=("pytorch-bad",)), contexts[1])["validation"]
    again = ValidationReport.read(second)
    assert again.failed_outputs == ("pytorch-worse",)
    assert again.output("pytorch-worse") == found.output("pytorch-worse")
    assert again.output("pytorch-bad").passed
    assert again.output("pytorch-bad").to_merged is not None
    assert contexts[1].facts["failed_outputs"] == ["pytorch-worse"]
