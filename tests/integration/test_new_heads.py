"""The typical classifier through the command a user types: a LoRA and a new head on a base that is stored without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands.cli import slipway
from support.models.headless_bases import make_headless

SETTINGS = {
    "formats.onnx.enabled": "false",
    "optimization.quantization": "int8",
    "validation.test_samples": "4",
    "validation.benchmark_performance": "false",
}
OUTPUTS = ["pytorch", "pytorch-int8"]


def export(root: Path, kind: str, *more: str, named: bool = False) -> object:
    base, adapter = make_headless(kind, root, named=named)
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    words = ("export", "--json", "--base-model", base, "--checkpoint", adapter, "--out", root / "out", *settings, *more)
    return slipway(*words, home=root / "home")


@pytest.mark.slow
def test_a_classifier_is_exported_and_passes(tmp_path: Path) -> None:
    done = export(tmp_path, "qwen3-tied", named=True)
    assert done.code == 0, done.err
    assert list(done.json["formats"]) == OUTPUTS
    assert done.json["validation_passed"] is True
    for folder in done.json["paths"].values():
        config = json.loads((Path(folder) / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForSequenceClassification"]
        assert config["id2label"]["1"] == "kind 1"


@pytest.mark.slow
def test_the_plan_names_the_class(tmp_path: Path) -> None:
    done = export(tmp_path, "qwen3-tied", "--plan")
    assert done.code == 0, done.err
    assert done.json["trained_as"] == {"class": "Qwen3ForSequenceClassification", "labels": 3}
    said = {finding["check"]: finding["message"] for finding in done.json["preflight"]["findings"]}
    assert said["model class"] == (
        "Qwen3ForSequenceClassification with 3 labels, whose head is in the adapter; the base is a decoder (Qwen3ForCausalLM)"
    )


@pytest.mark.slow
def test_a_model_type_without_such_a_class_is_refused_in_the_plan(tmp_path: Path) -> None:
    base, adapter = make_headless("qwen3-tied", tmp_path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps(config | {"model_type": "granite", "architectures": ["GraniteForCausalLM"]})
    )
    done = slipway("export", "--json", "--plan", "--base-model", base, "--checkpoint", adapter, home=tmp_path / "home")
    assert done.code == 6, done.err
    (finding,) = done.json["preflight"]["findings"]
    assert finding["reason"] == "FAMILY_UNSUPPORTED"
    assert "GraniteForCausalLM" in finding["message"]
