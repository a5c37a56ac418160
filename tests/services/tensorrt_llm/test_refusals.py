"""Models and settings that TensorRT-LLM would compute wrong are refused by name, before anything is written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slipway.errors import ModelExportError, TensorRTLLMExportError
from slipway.model.configuration import ModelConfig
from slipway_tensorrt_llm.export import checkpoint_fields
from slipway_tensorrt_llm.models.model import model_of, refusal_reason
from slipway_tensorrt_llm.models.table import ARCHITECTURES
from slipway_tensorrt_llm.params import TensorRTLLMParams
from support.models.tensorrt_llm_models import save_model, write_checkpoint

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
_QWEN3 = _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
_GEMMA3 = _LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 64,
}
_PHI3 = _LLAMA | {"architectures": ["Phi3ForCausalLM"]}
_GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize(
    ("config", "params", "why"),
    [
        (_LLAMA, {"tp": 4, "pp": 2}, ""),
        (_LLAMA, {"tp": 8}, ""),  # keys and values lie on two GPUs each
        (_LLAMA | {"architectures": ["BertForMaskedLM"]}, {}, "masked language model (BertForMaskedLM), and TensorRT-LLM checkpoints are written of Llama"),
        (_LLAMA | {"architectures": ["Qwen3MoeForCausalLM"]}, {}, "Qwen3MoeForCausalLM"),
        (_LLAMA | {"hidden_act": "gelu"}, {}, "hidden_act is 'gelu' in config.json, and TensorRT-LLM computes LlamaForCausalLM with 'silu'"),
        (_LLAMA, {"tp": 3}, "tp is 3, and the model's 8 attention heads cannot be divided by it"),
        (_LLAMA | {"intermediate_size": 100}, {"tp": 8}, "the model's 100 values within an MLP"),
        (_LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 8}, {"tp": 4}, "6 heads of keys and values can neither be divided"),
        (_LLAMA, {"pp": 3}, "pp is 3, and the model's 4 layers cannot be divided by it"),
        (_LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "rope_type is 'dynamic' in config.json, which TensorRT-LLM does not compute"),
        (_LLAMA | {"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor is 0.5"),
        (_QWEN3 | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}}, {}, "attention_factor is 1.0"),
        (_QWEN3 | {"attention_bias": True}, {}, "attention_bias is True"),
        (_QWEN3 | {"num_key_value_heads": 8}, {}, "each GPU has 8 heads of queries and of keys, whose norms TensorRT-LLM 1.2 applies to the wrong rows"),
        (_QWEN3 | {"num_key_value_heads": 8}, {"tp": 8}, ""),
        (_GEMMA3, {"tp": 4}, ""),
        (_GEMMA3 | {"vocab_size": 130}, {"tp": 4}, "vocabulary of 130 cannot be divided"),
        (_GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, {}, "rope_type is 'linear'"),
        (_GEMMA3 | {"layer_types": ["full_attention"] * 4}, {}, "layer_types is"),
        (_PHI3, {"pp": 2}, "TensorRT-LLM does not divide the layers of Phi3ForCausalLM"),
        (_PHI3 | {"rope_scaling": {"type": "longrope", "factor": 99.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}, {}, "factor is 99.0"),
        (_GPT2 | {"scale_attn_by_inverse_layer_idx": True}, {}, "scale_attn_by_inverse_layer_idx is True"),
    ],
)  # fmt: skip
def test_models_are_refused_by_name(config: dict[str, Any], params: dict[str, int], why: str) -> None:
    said = refusal_reason(TensorRTLLMParams(**params), ModelConfig(config))
    assert why in said
    assert bool(said) is bool(why)


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        ({"num_attention_heads": 3}, "BASE_MODEL_INVALID", "num_key_value_heads is 2 in config.json"),
        ({"num_attention_heads": 10**12}, "BASE_MODEL_INVALID", "has num_attention_heads 1000000000000, and at most 65536"),
        ({"num_hidden_layers": 10**6}, "BASE_MODEL_INVALID", "has num_hidden_layers 1000000, and at most 4096"),
        ({"rms_norm_eps": "NaN"}, "BASE_MODEL_INVALID", "rms_norm_eps is 'NaN' in config.json, and not a number"),
        ({"rope_parameters": [1]}, "BASE_MODEL_INVALID", "rope_parameters is"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": -1}}, "BASE_MODEL_INVALID", "factor is -1"),
        ({"intermediate_size": 95}, "TENSORRT_LLM_INVALID", "has the shape \\(96, 64\\), and config.json gives \\(95, 64\\)"),
        ({"num_hidden_layers": 1}, "TENSORRT_LLM_INVALID", "tensor 'model.layers.1.* has no place in a TensorRT-LLM checkpoint"),
        ({"num_hidden_layers": 3}, "TENSORRT_LLM_INVALID", "the model has no tensor 'model.layers.2."),
        ({"attention_bias": True}, "TENSORRT_LLM_INVALID", "no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"architectures": ["MambaForCausalLM"]}, "FAMILY_UNSUPPORTED", "MambaForCausalLM"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_the_models_is_refused(
    change: dict[str, Any], reason: str, said: str, tmp_path: Path
) -> None:
    save_model("llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelExportError, match=said) as error:
        write_checkpoint(tmp_path / "model", tmp_path / "work")
    assert error.value.reason == reason
    assert not list((tmp_path / "work").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("value", "dtype", "reason", "said"),
    [
        (float("nan"), "auto", "NON_FINITE_WEIGHTS", "weight 'model.norm.weight' contains NaN or infinity"),
        (70000.0, "float16", "WEIGHT_OVERFLOW", "weight 'model.norm.weight' has values beyond what float16 can hold; use dtype bfloat16"),
    ],
)  # fmt: skip
def test_values_that_no_checkpoint_holds_are_refused(
    value: float, dtype: str, reason: str, said: str, tmp_path: Path
) -> None:
    save_model("llama", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelExportError, match=said) as error:
        write_checkpoint(tmp_path / "model", tmp_path / "work", dtype=dtype)
    assert error.value.reason == reason


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelExportError, match=f"tensor '{name}' is stored as I8") as error:
        write_checkpoint(tmp_path / "model", tmp_path / "work")
    assert error.value.reason == "DTYPE_UNSUPPORTED"


_HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(("rope_type", "factor", "full_attention", "short_factor")), st.one_of(st.none(), st.integers(), st.lists(st.floats()), st.text())),
)  # fmt: skip
_KEYS = (
    *_LLAMA, "head_dim", "rope_parameters", "rope_scaling", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers",
    "tie_word_embeddings", "rms_norm_eps", "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings", "n_head",
)  # fmt: skip


@given(
    found=st.sampled_from([each.class_name for each in ARCHITECTURES]),
    changes=st.dictionaries(st.sampled_from(_KEYS), _HOSTILE, max_size=4),
    tp=st.integers(1, 64),
)
def test_no_configuration_ends_in_a_traceback(found: str, changes: dict[str, Any], tp: int) -> None:
    config = _LLAMA | _GPT2 | {"architectures": [found]} | changes
    assert isinstance(refusal_reason(TensorRTLLMParams(tp=tp), ModelConfig(config)), str)
    with contextlib.suppress(TensorRTLLMExportError):
        model = model_of(ModelConfig(config))
        assert json.loads(json.dumps(checkpoint_fields(model, dtype="float16", tp=tp, pp=1), allow_nan=False))
