"""Graphs of this year's other models: mixtures, latent attention, the text part of models of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, auto_model
from support.models.current_kinds import KINDS, make_kind
from support.models.onnx_calls import assert_same
from support.models.onnx_models import Exported

QUICK = ("ministral3",)
TEXT = ("gpt-oss", "deepseek-v3", "glm4-moe", "gemma3n", "gemma4", "ministral3", "llama4", "mixtral", "granite-moe")
FEWER_LAYERS = {
    "gemma3n": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
}
"""Of a kind that has many for llama.cpp. The last two read keys and values of the first two."""
OF_MANY = ("qwen3.5-vision", "qwen3-vl", "qwen2.5-vl", "gemma3-vision", "gemma4-vision", "mistral3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*TEXT, *OF_MANY)]
)
def test_any_calls_of_padded_rows_give_what_each_row_alone_gives(
    name: str, tmp_path: Path, export: Callable[..., Exported]
) -> None:
    source = make_kind(name, tmp_path / "kind", changes=FEWER_LAYERS.get(name, {})).base
    exported = export(source)
    assert exported.facts["parity"] == "passed"
    assert exported.facts.get("parts") == (["text"] if name in OF_MANY else None)
    loader = auto_model(DECODER, ModelConfig.read(source))
    assert_same(exported.folder, loader.from_pretrained(source, dtype=torch.float32).eval())


@pytest.mark.slow
def test_a_long_window_of_layers_that_read_keys_and_values_of_others(
    tmp_path: Path, export: Callable[..., Exported]
) -> None:
    recipe = KINDS["gemma4"]
    sizes = {**recipe.settings, "sliding_window": 600, "max_position_embeddings": 2048}
    replace(recipe, settings=sizes).build().save_pretrained(tmp_path / "model")
    exported = export(tmp_path / "model")
    assert exported.facts["parity"] == "passed"
    assert exported.facts["window"] == "compared"
