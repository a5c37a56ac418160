"""An int4 that exceeds its limits becomes one that passes, in one command, and the result says what was asked for and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import Done, slipway
from support.models import tiny_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fallback")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


def export(root: Path, out: str, **settings: str) -> Done:
    usual = {
        "optimization.quantization": "int4",
        "optimization.group_size": "16",
        "optimization.time_budget": "1",
        "formats.onnx.enabled": "false",
        "validation.benchmark_performance": "false",
        "validation.test_samples": "2",
        "validation.limits": "int4.mean_kl=1e-12",
    }
    assigned = [word for key, value in {**usual, **settings}.items() for word in ("--set", f"{key}={value}")]
    return slipway(
        "export", "--json", "--base-model", root / "base", "--checkpoint", root / "run", "--out", root / out, *assigned,
        home=root / "home", timeout=900,
    )  # fmt: skip


def attempts(done: Done, stage: str) -> list[dict[str, Any]]:
    return [attempt for attempt in done.json["attempts"] if attempt["stage"] == stage]


def test_it_is_made_again_until_it_passes(root: Path) -> None:
    done = export(root, "fallback", **{"validation.on_failure": "fallback"})
    assert done.code == 0, done.err
    assert list(done.json["formats"]) == ["pytorch", "pytorch-int8"]
    found = done.json["formats"]["pytorch-int8"]
    assert (found["status"], found["requested"]) == ("passed", "pytorch-int4")
    assert "pytorch-int4 failed validation" in found["replaced"]
    assert found["replaced"] in done.json["warnings"]
    assert not any("pytorch-int4: " in warning for warning in done.json["warnings"]), "nothing that failed is delivered"
    tried = attempts(done, "quantize")
    rules = ["quantize-rejected-calibrated", "quantize-rejected-mixed", "quantize-rejected-int8"]
    assert [each["rule"] for each in tried] == ["", *rules]
    assert [each["reason"] for each in tried] == [*["VALIDATION_FAILED"] * 3, ""]
    assert [each["outcome"] for stage in ("calibration_data", "calibrate") for each in attempts(done, stage)] == [
        "succeeded"
    ] * 2
    folder = Path(done.json["output_directory"])
    assert (folder / "pytorch-int8" / "config.json").is_file()
    assert not (folder / "pytorch-int4").exists()
    assert "pytorch-int8 instead of pytorch-int4" in (folder / "report.html").read_text()
    assert "**pytorch-int8:** pytorch-int4 failed validation" in (folder / "README.md").read_text()


def test_better_integers_are_enough_where_they_pass(root: Path) -> None:
    """The limit lies just below what rounding adds; the output keeps its name. Otherwise it is delivered as it is, with a warning."""
    rounded = export(root, "rounded", **{"validation.on_failure": "keep"})
    assert rounded.code == 0, rounded.err
    assert_delivered_as_it_is(rounded)
    assert any("pytorch-int4 failed validation" in warning for warning in rounded.json["warnings"])
    limit = {"validation.limits": f"int4.mean_kl={rounded.json['formats']['pytorch-int4']['mean_kl'] * 0.99}"}
    done = export(root, "better", **limit, **{"validation.on_failure": "fallback"})
    assert done.code == 0, done.err
    assert list(done.json["formats"]) == ["pytorch", "pytorch-int4"]
    assert [each["rule"] for each in attempts(done, "quantize")] == ["", "quantize-rejected-calibrated"]
    assert "integers chosen by their effect on text" in done.json["formats"]["pytorch-int4"]["replaced"]


def test_each_new_level_becomes_the_next_wider_one(root: Path) -> None:
    """Two levels that fail in one export: each is made again by its own rules, validated, and delivered under the level that passed."""
    done = export(
        root, "levels", **{
            "optimization.quantization": "none",
            "optimization.group_size": "32",
            "formats.pytorch.quantization": "int3",
            "formats.onnx.enabled": "true",
            "formats.onnx.quantization": "int8_static",
            "validation.limits": "int3.mean_kl=1e-12,int8_static.mean_kl=1e-12",
            "validation.on_failure": "fallback",
            "recovery.max_attempts": "8",
        },
    )  # fmt: skip
    assert done.code == 0, done.err
    expected = {
        "pytorch-int4": ("pytorch-int3", ["groups-of-16", "mixed", "int4"]),
        "onnx-int8": ("onnx-int8_static", ["mixed", "int8"]),
    }
    assert set(done.json["formats"]) == {"pytorch", "onnx", *expected}
    tried = attempts(done, "quantize")
    for name, (requested, rules) in expected.items():
        found = done.json["formats"][name]
        assert (found["status"], found["requested"]) == ("passed", requested)
        assert f"{requested} failed validation" in found["replaced"]
        assert found["replaced"] in done.json["warnings"]
        assert Path(done.json["paths"][name]).is_dir()
        assert not (Path(done.json["output_directory"]) / requested).exists()
        own = [each for each in tried if each["task"] == f"quantize-{requested}"]
        assert [each["rule"] for each in own] == ["", *(f"quantize-rejected-{rule}" for rule in rules)]
        assert {each["reason"] for each in own[:-1]} == {"VALIDATION_FAILED"}
    page = (Path(done.json["output_directory"]) / "report.html").read_text()
    assert all(f"{name} instead of {requested}" in page for name, (requested, _) in expected.items())


def test_a_failure_is_the_exports_where_that_is_asked_for(root: Path) -> None:
    done = export(root, "fail", **{"validation.on_failure": "fail"})
    assert done.code == 4, done.err
    assert_delivered_as_it_is(done)
    assert not any("pytorch-int4 failed validation" in warning for warning in done.json["warnings"])


def assert_delivered_as_it_is(done: Done) -> None:
    assert done.json["formats"]["pytorch-int4"]["status"] == "failed"
    assert done.json["validation_passed"] is False
    assert len(attempts(done, "quantize")) == 1
    assert not attempts(done, "calibrate")
