"""What is known of a plain decoder by its tensors is what its own code says; whatever differs in the least is left to that code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER
from slipway.model.safetensors_file import TensorInfo
from slipway_quantize.layers.model_code import find_linear_layers
from slipway_quantize.layers.plain_decoders import PLAIN_DECODERS, plain_structure

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip


def settings_of(config: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a checkpoint."""
    settings: dict[str, Any] = json.loads(config.to_json_string())
    return settings | {"architectures": [PLAIN_DECODERS[config.model_type].name]}


def stored(model: Any) -> dict[str, TensorInfo]:
    """Return the tensors that a checkpoint of a model on ``meta`` would have: what is tied is stored once."""
    return {
        name: TensorInfo(name, "BF16", tuple(value.shape), Path("model.safetensors"), 0, 0)
        for name, value in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return tf.AutoModelForCausalLM.from_config(config)


def llama(**changes: Any) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    config = tf.LlamaConfig(**SIZES, **changes)
    return settings_of(config), stored(on_meta(config))


@pytest.mark.parametrize("kind", PLAIN_DECODERS)
def test_the_model_s_code_says_the_same(kind: str) -> None:
    for changes in ({"tie_word_embeddings": False}, {"tie_word_embeddings": True, "attention_bias": True}):
        config = tf.CONFIG_MAPPING[kind](**SIZES, **changes)
        settings, tensors = settings_of(config), stored(on_meta(config))
        by_code = find_linear_layers(config, DECODER, tensors)
        assert plain_structure(ModelConfig(settings), tensors) == by_code
        assert len(by_code.linear) == 7 * 3 + 1
        if not changes["tie_word_embeddings"]:
            continue
        twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        assert plain_structure(ModelConfig(settings), twice) == find_linear_layers(config, DECODER, twice)


@pytest.mark.parametrize("kind", PLAIN_DECODERS)
def test_what_a_configuration_leaves_out_is_what_its_class_takes(kind: str) -> None:
    """Only the sizes of every checkpoint are stated."""
    config = tf.CONFIG_MAPPING[kind](**{name: size for name, size in SIZES.items() if name != "dtype"})
    stated = {"model_type": kind, "architectures": [PLAIN_DECODERS[kind].name], **SIZES}
    stated.pop("dtype")
    tensors = stored(on_meta(config))
    found = plain_structure(ModelConfig(stated), tensors)
    assert found == find_linear_layers(config, DECODER, tensors)
    assert found is not None
    assert found.dtype is None


def reshaped(name: str, *shape: int) -> Callable[[dict[str, TensorInfo]], Mapping[str, TensorInfo]]:
    return lambda tensors: tensors | {name: TensorInfo(name, "BF16", shape, Path("f"), 0, 0)}


def without(name: str) -> Callable[[dict[str, TensorInfo]], Mapping[str, TensorInfo]]:
    return lambda tensors: {other: info for other, info in tensors.items() if other != name}


@pytest.mark.parametrize(
    "change",
    [
        reshaped("model.layers.1.self_attn.k_proj.weight", 32, 32),
        reshaped("model.layers.1.mlp.gate.weight", 4, 32),
        reshaped("model.layers.3.mlp.up_proj.weight", 48, 32),
        reshaped("model.layers.0.self_attn.rotary_emb.inv_freq", 4),
        reshaped("model.layers.0.input_layernorm.weight", 1, 32),
        reshaped("model.layers.0.self_attn.q_proj.weight"),
        without("model.layers.2.mlp.down_proj.weight"),
        without("model.embed_tokens.weight"),
        without("lm_head.weight"),
    ],
)
def test_other_tensors_are_left_to_the_code(
    change: Callable[[dict[str, TensorInfo]], Mapping[str, TensorInfo]],
) -> None:
    settings, tensors = llama()
    assert plain_structure(ModelConfig(settings), tensors) is not None
    assert plain_structure(ModelConfig(settings), change(tensors)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mixtral"},
        {"model_type": ["llama"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None},
        {"text_config": {}},
        {"num_hidden_layers": 1_000_000_000},
        {"num_hidden_layers": True},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"head_dim": 16},
        {"vocab_size": "96"},
        {"tie_word_embeddings": "yes"},
        {"dtype": ["bfloat16"]},
        {"dtype": "float8_e4m3fn"},
        {"rope_parameters": 7},
        {"rope_parameters": {"rope_type": ["default"]}},
        {"layer_types": [3, 3, 3]},
        {"layer_types": ["full_attention"]},
        {"quantization_config": ["x"]},
        {"hidden_act": "unheard"},
        {"rms_norm_eps": "small"},
    ],
)
def test_other_configurations_are_left_to_the_code(changes: dict[str, Any]) -> None:
    settings, tensors = llama()
    assert plain_structure(ModelConfig(settings | changes), tensors) is None


def test_the_older_name_of_the_type_counts_where_the_newer_one_is_missing() -> None:
    settings, tensors = llama()
    settings["torch_dtype"] = "float16"
    newer = plain_structure(ModelConfig(settings), tensors)
    older = plain_structure(ModelConfig(settings | {"dtype": None}), tensors)
    assert newer is not None
    assert older is not None
    assert (newer.dtype, older.dtype) == ("BF16", "F16")
