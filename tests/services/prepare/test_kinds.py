"""Bases whose config.json does not name their kind, and settings that do."""

from __future__ import annotations

import json

import torch
import transformers
from safetensors.torch import load_file

from slipway.model.configuration import ModelConfig
from slipway.model.families import FEATURE_EXTRACTION
from support.models.prepare_models import refusal, run


def bert(folder):
    """A BERT as it was stored before configurations had a model_type and named their class."""
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=40
    )
    transformers.BertModel(config).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    for key in ("model_type", "architectures"):
        del settings[key]
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_the_kind_that_the_settings_name_is_written_with_its_bare_class(tmp_path):
    folder = bert(tmp_path / "bert")
    before = load_file(folder / "model.safetensors")
    out, tensors, _ = run(folder, tmp_path, model_type="bert")
    assert sorted(tensors) == sorted(before)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert ModelConfig.read(out).family is FEATURE_EXTRACTION
    assert type(transformers.AutoModel.from_pretrained(out)) is transformers.BertModel


def test_without_it_the_remedy_names_the_setting(tmp_path):
    error = refusal(bert(tmp_path / "bert"), tmp_path)
    assert error.reason == "BASE_MODEL_INVALID"
    assert "names no model_type" in error.message
    assert "base_model.model_type: bert" in error.remedy


def test_another_kind_than_the_folder_says_is_refused(dense, tmp_path):
    error = refusal(dense, tmp_path, model_type="bert")
    assert (error.reason, "'qwen3'" in error.message) == ("BASE_MODEL_INVALID", True)
