"""A trained classifier in 4 bits, by the command a user types: rounded and calibrated, both formats, judged on a labelled set of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import Done, slipway
from support.models.trained_classifier import make_classifier

pytestmark = pytest.mark.slow

CHANCE = 1 / 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classifier")
    make_classifier(root)
    return root


def export(root: Path, out: str, **settings: str) -> Done:
    usual = {
        "formats.pytorch.enabled": "true",
        "formats.onnx.enabled": "true",
        "optimization.quantization": "int4",
        "optimization.calibration": str(root / "train"),
        "validation.heldout": str(root / "heldout"),
        "validation.test_input_samples": str(root / "labelled.jsonl"),
        "validation.benchmark_performance": "false",
        "output.naming_pattern": "out",
    }
    assigned = [word for key, value in {**usual, **settings}.items() for word in ("--set", f"{key}={value}")]
    return slipway(
        "export",
        "--json",
        "--base-model",
        root / "model",
        "--out",
        root / out,
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


@pytest.fixture(scope="module", params=["rtn", "gptq"])
def made(root: Path, request: pytest.FixtureRequest) -> tuple[str, Done]:
    return request.param, export(root, request.param, **{"optimization.method": request.param})


def test_four_bits_keep_the_classes(made: tuple[str, Done]) -> None:
    method, done = made
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
        methods = json.loads((Path(done.json["paths"][name]) / "quantization.json").read_text()).get(
            "weights_by_method", ["rtn"]
        )
        assert (method == "rtn") is (set(methods) <= {"rtn"}), methods


def test_an_exceeded_limit_fails_that_output_alone_and_by_name(root: Path) -> None:
    done = export(
        root,
        "failed",
        **{"validation.limits": "int4.mean_kl=1e-12", "validation.on_failure": "fail", "formats.onnx.enabled": "false"},
    )
    assert done.code == 4, done.err
    found = judged(done)
    assert found["pytorch"]["status"] == "passed"
    failed = {check["name"] for check in found["pytorch-int4"]["checks"] if not check["passed"]}
    assert failed == {"mean_kl"}
