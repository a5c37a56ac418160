"""Programs for LiteRT through the command a user types, judged by LiteRT's interpreter, and run by the example of the card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import slipway
from support.commands.usage_examples import usage_examples
from support.models.judged_families import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("litert_torch", reason="the extra litert is not installed")

ONLY = {
    "formats.pytorch.enabled": "false", "formats.onnx.enabled": "false", "formats.tensorrt.enabled": "false",
    "formats.litert.enabled": "true", "formats.litert.quantization": "int8", "optimization.quantization": "none",
    "validation.benchmark_performance": "false",
}  # fmt: skip


def exported(root: Path, *words: str | Path, **changes: str) -> tuple[Path, dict[str, Any]]:
    settings = [word for key, value in (ONLY | changes).items() for word in ("--set", f"{key}={value}")]
    done = slipway("export", "--json", *words, "--out", root / "out", *settings, home=root / "home", timeout=1500)
    assert done.code == 0, done.err[-3000:]
    return Path(done.json["output_directory"]), done.json["formats"]


def run_example(folder: Path, name: str) -> str:
    code = usage_examples((folder / "README.md").read_text())[name]
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_sample_passes_at_every_level(sample: Path, tmp_path: Path) -> None:
    folder, formats = exported(tmp_path, "-c", sample / "export.yaml")
    assert {name: each["status"] for name, each in formats.items()} == {"litert": "passed", "litert-int8": "passed"}
    assert formats["litert"]["mean_kl"] < 1e-6
    assert formats["litert-int8"]["mean_kl"] < 1e-3
    assert formats["litert-int8"]["size_bytes"] < formats["litert"]["size_bytes"] / 3
    assert run_example(folder, "litert").strip()


def test_a_classifier_with_an_adapter_passes(tmp_path: Path) -> None:
    model = make("bert-classes", tmp_path / "bert")
    folder, formats = exported(
        tmp_path, "--base-model", model.base, "--checkpoint", model.adapter, **{"validation.test_samples": "4"}
    )
    assert formats["litert"]["status"] == "passed"
    described = json.loads((folder / "litert" / "litert.json").read_text())
    assert described["signatures"]["text_32"] == ["input_ids", "attention_mask", "token_type_ids"]
    assert described["outputs"] == ["logits"]
    assert "LABEL" in run_example(folder, "litert-int8")
