"""Models of every family through the command a user types: merged or as they are, quantized, and judged by what they compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands.cli import slipway
from support.models.judged_families import make

SETTINGS = {
    "formats.onnx.enabled": "false",
    "optimization.quantization": "fp16,int8",
    "validation.test_samples": "4",
    "validation.benchmark_performance": "false",
}
OUTPUTS = ["pytorch", "pytorch-fp16", "pytorch-int8"]


def export(root: Path, name: str, *more: str | Path) -> dict[str, object]:
    model = make(name, root / name)
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    checkpoint = more or ("--checkpoint", model.adapter)
    words = ("export", "--json", "--base-model", model.base, *checkpoint, "--out", root / "out", *settings)
    done = slipway(*words, home=root / "home")
    assert done.code == 0, done.err
    return done.json


@pytest.mark.parametrize(
    "name",
    [
        "marian",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("t5", "bart", "whisper", "bert-classes", "roberta-classes", "qwen3-classes")
        ),
    ],
)
def test_each_family_is_exported_and_passes(tmp_path: Path, name: str) -> None:
    result = export(tmp_path, name)
    assert list(result["formats"]) == OUTPUTS
    assert result["validation_passed"] is True
    assert {attempt["stage"] for attempt in result["attempts"]} == {"merge", "quantize", "validate"}


@pytest.mark.slow
def test_a_plain_model_is_judged_against_itself(tmp_path: Path) -> None:
    result = export(tmp_path, "gpt2", "--checkpoint", "none")
    assert list(result["formats"]) == OUTPUTS
    assert result["validation_passed"] is True
    assert result["plain"] is True
