"""TensorRT-LLM checkpoints through the command a user types: delivered, computed from the folder alone, and not run."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands.cli import Done, slipway
from support.commands.usage_examples import usage_examples
from support.models.judged_families import make
from support.models.tensorrt_llm_models import Reader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ONLY = {
    "formats.pytorch.enabled": "true", "formats.onnx.enabled": "false", "formats.tensorrt.enabled": "false", "formats.tensorrt_llm.enabled": "true",
    "optimization.quantization": "none", "validation.test_samples": "2", "validation.benchmark_performance": "false",
}  # fmt: skip


def export(root: Path, *words: str | Path, **changes: str) -> Done:
    settings = [word for key, value in (ONLY | changes).items() for word in ("--set", f"{key}={value}")]
    return slipway("export", "--json", *words, "--out", root / "out", *settings, home=root / "home", timeout=800)


def test_the_sample_is_delivered_for_four_gpus_and_not_run(sample: Path, tmp_path: Path) -> None:
    changes = {"formats.tensorrt_llm.tp": "2", "formats.tensorrt_llm.pp": "2", "formats.tensorrt_llm.dtype": "float32"}
    done = export(tmp_path, "-c", sample / "export.yaml", **{"formats.pytorch.quantization": "none"}, **changes)
    assert done.code == 0, done.err[-3000:]
    folder = Path(done.json["output_directory"])
    assert {name: each["status"] for name, each in done.json["formats"].items()} == {
        "pytorch": "passed", "tensorrt_llm": "not_run"
    }  # fmt: skip
    rows = {each["name"]: each for each in json.loads((folder / "report.json").read_text())["validation"]["outputs"]}
    assert "needs an engine that TensorRT-LLM 1.2 or earlier builds" in rows["tensorrt_llm"]["status_reason"]
    tokens = list(range(5, 37))
    assert (
        Reader(folder / "tensorrt_llm").logits(tokens) - merged_logits(folder / "pytorch", tokens)
    ).abs().max() < 1e-3
    assert (folder / "tensorrt_llm" / "chat_template.jinja").is_file()
    code = usage_examples((folder / "README.md").read_text())["tensorrt_llm"]
    assert ast.parse(code)
    assert '"--checkpoint_dir", folder' in code


def merged_logits(folder: Path, tokens: list[int]) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.tensor([tokens])).logits[0]


def test_a_classifier_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = make("bert-classes", tmp_path / "bert")
    only = {"formats.pytorch.enabled": "false"}
    done = export(tmp_path, "--base-model", model.base, "--checkpoint", model.adapter, "--plan", **only)
    said = done.out + done.err
    assert (
        "sequence classifier (BertForSequenceClassification), and TensorRT-LLM checkpoints are written of Llama" in said
    )
