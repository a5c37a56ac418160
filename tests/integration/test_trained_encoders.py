"""A trained classifier in 4 bits, by the command a user types: calibrated, both formats, judged on a labelled set of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import Done, slipway

pytestmark = pytest.mark.slow

CHANCE = 1 / 6


def export(classifier: Path, root: Path) -> Done:
    settings = {
        "formats.pytorch.enabled": "true",
        "formats.onnx.enabled": "true",
        "optimization.quantization": "int4",
        "optimization.method": "gptq",
        "optimization.calibration": classifier / "train",
        "validation.heldout": classifier / "heldout",
        "validation.test_input_samples": classifier / "labelled.jsonl",
        "validation.benchmark_performance": "false",
        "output.naming_pattern": "out",
    }
    assigned = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return slipway(
        "export",
        "--json",
        "--base-model",
        classifier / "model",
        "--out",
        root / "out",
        *assigned,
        home=root / "home",
        timeout=900,
    )


def judged(done: Done) -> dict[str, dict[str, Any]]:
    """Return the outputs of the validation by name."""
    report = json.loads((Path(done.json["output_directory"]) / "report.json").read_text())
    return {output["name"]: output for output in report["validation"]["outputs"]}


def accuracy(output: dict[str, Any]) -> tuple[float, float]:
    """Return the accuracy of an output and the reference's."""
    first = output["answers"]["scores"][0]
    assert first["name"] == "accuracy"
    assert output["answers"]["with_expected"] == output["answers"]["inputs"] == 100
    return first["value"], first["reference"]


def test_four_bits_keep_the_classes(classifier: Path, tmp_path: Path) -> None:
    done = export(classifier, tmp_path)
    assert done.code == 0, done.err
    found = judged(done)
    assert set(found) == {"pytorch", "pytorch-int4", "onnx", "onnx-int4"}
    for name, output in found.items():
        own, reference = accuracy(output)
        assert reference > 3 * CHANCE
        assert abs(own - reference) <= 0.05, name
        assert output["status"] == "passed"
    for name in ("pytorch-int4", "onnx-int4"):
        assert 1e-6 < found[name]["to_reference"]["mean_kl"] < 2e-2
        facts = json.loads((Path(done.json["paths"][name]) / "quantization.json").read_text())
        assert "gptq" in facts["weights_by_method"], name
