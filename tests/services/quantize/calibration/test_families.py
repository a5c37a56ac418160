"""Families beside decoders: the stage finds their blocks, their heads and what is compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from slipway.stage import Context
from support.models.calibrated_models import Material

Calibrate = Callable[..., tuple[Path, Context]]
BERT: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
QWEN: dict[str, Any] = {**BERT, "num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "bert classifier": lambda: tf.BertForSequenceClassification(tf.BertConfig(**BERT, num_labels=3)),
    "bert token classifier": lambda: tf.BertForTokenClassification(tf.BertConfig(**BERT, num_labels=3)),
    "bert question answering": lambda: tf.BertForQuestionAnswering(tf.BertConfig(**BERT)),
    "bert masked language model": lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT)),
    "bert feature extraction": lambda: tf.BertModel(tf.BertConfig(**BERT)),
    "distilbert classifier": lambda: tf.DistilBertForSequenceClassification(
        tf.DistilBertConfig(vocab_size=1024, dim=64, hidden_dim=128, n_layers=2, n_heads=2, num_labels=3)
    ),
    "qwen3 classifier": lambda: tf.Qwen3ForSequenceClassification(tf.Qwen3Config(**QWEN, num_labels=3)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**{**QWEN, "num_key_value_heads": 1, "sliding_window": 16})
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**{**BERT, "num_key_value_heads": 1})),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{**BERT, "num_key_value_heads": 2})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_family_is_calibrated(name: str, material: Material, tmp_path: Path, calibrate: Calibrate) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)  # results that differ, unlike those of a fresh model
    model.save_pretrained(tmp_path / "model")
    for path in material.model.glob("tokenizer*"):
        shutil.copyfile(path, tmp_path / "model" / path.name)
    folder, ctx = calibrate(tmp_path / "model", material.data, time_budget_seconds=4)
    measured = ctx.facts["divergence"]
    assert measured["gptq"] < measured["rtn"]
    assert "autoround" in measured
    weights = json.loads((folder / "calibration.json").read_text())["weights"]
    assert len(weights) >= 8
    best = min(measured, key=measured.__getitem__)
    assert ({each["method"] for each in weights.values()} == {best}) or best == "best of each layer"
    assert not any(name.startswith(("classifier", "score", "qa_outputs")) for name in weights)
