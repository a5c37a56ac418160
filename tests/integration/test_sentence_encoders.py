"""Sentence encoders whose files name another class through the command a user types: every output gives the vector of a text."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import peft
import pytest
import torch
import transformers

from support.commands.cli import slipway
from support.models.judged_families import make
from support.models.sentence_models import write_modules

pytestmark = pytest.mark.slow


def trained_on_a_language_model(root: Path) -> tuple[Path, Path]:
    """A masked language model without a pooler, and an adapter that sentence-transformers trained on it."""
    base = make("bert-masked", root).base
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["query", "value"], init_lora_weights=False, task_type="FEATURE_EXTRACTION"
    )
    adapter = root / "trained"
    peft.get_peft_model(transformers.AutoModel.from_pretrained(base), config).save_pretrained(adapter)
    write_modules(adapter, settings={"pooling_mode": "cls"})
    return base, adapter


def test_every_output_gives_the_vector_of_a_text(tmp_path: Path) -> None:
    base, adapter = trained_on_a_language_model(tmp_path / "model")
    settings = (
        "optimization.quantization=none",
        "validation.test_samples=4",
        "validation.benchmark_performance=false",
    )
    words = ("export", "--json", "--base-model", base, "--checkpoint", adapter, "--out", tmp_path / "out")
    done = slipway(*words, *(word for each in settings for word in ("--set", each)), home=tmp_path / "home")
    assert done.code == 0, done.err
    made = {name: each["status"] for name, each in done.json["formats"].items()}
    assert made == {"pytorch": "passed", "onnx": "passed"}
    folder = Path(done.json["output_directory"])
    lineage = json.loads((folder / "lineage.json").read_text())
    (merged,) = (task["outputs"]["pytorch"] for task in lineage["tasks"] if task["stage"] == "merge")
    graph = onnx.load(folder / "onnx" / "model.onnx", load_external_data=False)
    assert "sentence_embedding" in {value.name for value in graph.graph.output}
    assert {entry.key: entry.value for entry in graph.metadata_props}["lineage"] == merged
    assert json.loads((folder / "pytorch" / "config.json").read_text())["architectures"] == ["BertModel"]
    assert "feature-extraction" in (folder / "README.md").read_text()
