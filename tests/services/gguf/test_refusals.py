"""Settings and tensors of recent models that llama.cpp computes otherwise, or that a file would lose, are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.errors import AdapterExportError, GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway_gguf.architectures import architecture_of, refusal_reason, text_part
from slipway_gguf.metadata import field_of, parameters_of
from slipway_gguf.weights.header import header
from slipway_gguf.weights.tensors import plan_file
from support.models.gguf_families import settings_of
from support.models.gguf_models import edit_model, save_adapter, save_family, write_adapter, write_gguf

pytestmark = pytest.mark.own_process


Tensors = dict[str, torch.Tensor]


_LINEAR, _FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "settings", "key"),
    [
        ("qwen35", {"linear_value_head_dim": 32}, "linear_value_head_dim"),
        ("qwen35", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("qwen35", {"layer_types": [_FULL, _LINEAR, _LINEAR, _FULL]}, "layer_types"),
        ("qwen35", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3next", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3next", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("granitehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("granitehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("granitehybrid", {"mamba_conv_bias": False}, "mamba_conv_bias"),
        ("granite-4-attention-experts", {"position_embedding_type": "nope"}, "position_embedding_type"),
        ("falcon-h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("falcon-h1", {"projectors_bias": True}, "projectors_bias"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"time_step_min": 0.1}, "time_step_min"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, "moe_latent_size"),
        ("nemotron_h_moe", {"layers_block_type": ["moe", "mlp", "linear_attention"]}, "layers_block_type"),
        ("jamba", {"mamba_expand": 3}, "mamba_expand"),
        ("jamba", {"mamba_conv_bias": False}, "mamba_conv_bias"),
        ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act"),
        ("jamba-dense", {"head_dim": 32}, "head_dim"),
        ("glm4moe", {"n_group": 2}, "n_group"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt-oss", {"layer_types": [_FULL] * 4}, "layer_types"),
        ("deepseek2", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek2", {"num_hidden_layers": 27}, "q_lora_rank"),
        ("deepseek-v2", {"num_hidden_layers": 26}, "q_lora_rank"),
        ("deepseek-v2", {"num_hidden_layers": 48, "vocab_size": 128256}, "q_lora_rank"),
        ("deepseek-v2", {"n_group": 4, "topk_group": 1}, "topk_group"),
        ("deepseek-v2", {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}, "topk_group"),
        ("deepseek-v2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "mscale"),
        ("llama4", {"attention_chunk_size": 4096}, "attention_chunk_size"),
        ("llama4", {"attn_temperature_tuning": False}, "attn_temperature_tuning"),
        ("llama4", {"floor_scale": 4096}, "floor_scale"),
        ("llama4", {"attn_scale": 0.2}, "attn_scale"),
        ("llama4", {"attention_bias": True}, "attention_bias"),
        ("llama4", {"no_rope_layers": [1, 1, 0, 1, 1]}, "no_rope_layers"),
        ("llama4", {"no_rope_layers": None, "no_rope_layer_interval": 3}, "no_rope_layer_interval"),
        ("llama4", {"layer_types": [_FULL] * 5}, "layer_types"),
        ("llama4", {"moe_layers": [0, 3]}, "moe_layers"),
        ("llama4", {"moe_layers": []}, "moe_layers"),
        ("llama4", {"use_qk_norm": False}, "use_qk_norm"),
        ("llama4", {"num_local_experts": 128}, "use_qk_norm"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("mistral3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("command-r", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("cohere2", {"sliding_window": None}, "sliding_window"),
        ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}, "sliding_window_pattern"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
        ("olmo", {"head_dim": 32}, "head_dim"),
        ("olmo2", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e6}}}, "rope_theta"),
        ("phi2", {"qk_layernorm": True}, "qk_layernorm"),
        ("starcoder2", {"use_bias": False}, "use_bias"),
        ("stablelm", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act"),
        ("nemotron", {"head_dim": 32}, "head_dim"),
        ("ernie4_5", {"use_bias": True}, "use_bias"),
        ("chatglm", {"head_dim": 32}, "head_dim"),
        ("exaone4", {"num_hidden_layers": 64}, "sliding_window"),
        ("exaone4", {"sliding_window": 16}, "num_hidden_layers"),
        ("hunyuan-dense", {"attention_bias": True}, "attention_bias"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias"),
        ("arcee", {"mlp_bias": True}, "mlp_bias"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act"),
        ("gptneox", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {"parallel_attn": False}, "parallel_attn"),
        ("starcoder", {"activation_function": "relu"}, "activation_function"),
        ("mpt", {"attn_config": {"softmax_scale": 0.1}}, "softmax_scale"),
        ("mpt", {"no_bias": False}, "no_bias"),
        ("jais2", {"attention_bias": False}, "attention_bias"),
        ("minicpm3", {"scale_emb": 1}, "scale_emb"),
        ("minicpm3", {"scale_depth": None}, "scale_depth"),
        ("minicpm3", {"q_lora_rank": None}, "q_lora_rank"),
        ("youtu", {"rope_interleave": False}, "rope_interleave"),
        ("gemma3n", {"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ("gemma3n", {"activation_sparsity_pattern": [0.0] * 25}, "activation_sparsity_pattern"),
        ("gemma3n", {"laurel_rank": 32}, "laurel_rank"),
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}, "per_layer_config"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"rope_parameters": {"full_attention": "proportional"}}, "rope_parameters"),
    ],
    ids=str,
)
def test_settings_that_llama_cpp_computes_otherwise_are_refused(
    family: str, settings: dict[str, Any], key: str
) -> None:
    config = settings_of(family)
    assert refusal_reason(ModelConfig(config)) == ""
    assert refusal_reason(ModelConfig({**config, **settings})).startswith(f"{key} is ")


def test_the_number_that_llama_4_was_published_with_is_computed_as_true() -> None:
    for value in (4, True, None):
        assert refusal_reason(ModelConfig({**settings_of("llama4"), "attn_temperature_tuning": value})) == ""
    assert refusal_reason(ModelConfig({**settings_of("llama4"), "attn_temperature_tuning": 0}))


@pytest.mark.parametrize(
    "family", ["falcon-h1", "nemotron_h_moe", "gemma4", "qwen3vl", "deepseek2", "llama4-text-part", "jamba"]
)
def test_no_value_of_a_setting_is_a_fault_of_the_program(family: str) -> None:
    settings = settings_of(family)
    for part in (settings, settings.get("text_config", {})):
        for key, value in list(part.items()):
            for other in ("x", None, -1, 0, [], {}, [None], 1 << 40):
                part[key] = other
                config = ModelConfig(settings)
                own = text_part(config) or config
                found = architecture_of(own)
                if found and not refusal_reason(config):
                    with suppress(GGUFExportError):
                        parameters_of(found, own)
            part[key] = value


def test_shares_of_axes_that_are_more_than_the_frequencies_are_refused(tmp_path: Path) -> None:
    save_family("qwen3vl", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [24, 20, 20]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(GGUFExportError, match=r"^mrope_section is "):
        write_gguf(tmp_path / "model", tmp_path / "work")


@pytest.mark.parametrize(
    ("family", "module"),
    [("gemma4", "per_layer_model_projection"), ("deepseek2", "kv_b_proj"), ("deepseek2", "q_a_proj")],
)
def test_factors_that_llama_cpp_would_not_use_are_refused(family: str, module: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model")
    save_adapter(model, tmp_path / "adapter", target_modules=[module])
    with pytest.raises(AdapterExportError, match=module) as caught:
        write_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "work")
    assert caught.value.reason == "ADAPTER_TENSOR_UNUSED"


def test_a_layer_that_lacks_a_tensor_of_its_kind_is_named(tmp_path: Path) -> None:
    save_family("lfm2", tmp_path / "model")
    edit_model(tmp_path / "model", lambda tensors: tensors.__delitem__("model.layers.2.conv.out_proj.weight"))
    with pytest.raises(GGUFExportError, match=r"blk\.2\.shortconv\.out_proj\.weight"):
        write_gguf(tmp_path / "model", tmp_path / "work")


def test_a_tensor_of_another_size_than_the_settings_say_is_named(tmp_path: Path) -> None:
    save_family("qwen35", tmp_path / "model")
    edit_model(tmp_path / "model", lambda _: None, linear_num_value_heads=8)
    with pytest.raises(GGUFExportError, match="linear_attn") as caught:
        write_gguf(tmp_path / "model", tmp_path / "work")
    assert caught.value.reason == "GGUF_INVALID"


def _lengthen(tensors: Tensors) -> None:
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:8]])


def _lose_embedding(tensors: Tensors) -> None:
    del tensors["model.embed_tokens.weight"]


def _lose_activation(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.act_fn.beta"]


def _lose_router(tensors: Tensors) -> None:
    del tensors["model.layers.3.feed_forward.router.weight"]


def _lose_norm(tensors: Tensors) -> None:
    del tensors["model.layers.2.mamba.b_layernorm.weight"]


def _lose_attention(tensors: Tensors) -> None:
    del tensors["model.layers.0.self_attn.o_proj.weight"]


def _add_beyond(tensors: Tensors) -> None:
    tensors["model.layers.77.mlp.gate.e_score_correction_bias"] = torch.zeros(8)


def _add_again(tensors: Tensors) -> None:
    tensors["language_model.model.norm.weight"] = tensors["model.language_model.norm.weight"] * 2


def _number_highly(tensors: Tensors) -> None:
    tensors[f"model.altup_projections.{10**15}.weight"] = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("family", "change", "settings", "named"),
    [
        ("qwen3next", _lengthen, {}, "in_proj_qkvz"),
        ("falcon-h1", _lose_embedding, {"tie_word_embeddings": True, "embedding_multiplier": 2.0}, "token_embd"),
        ("llama4", _lose_router, {}, "blk.3.ffn_gate_inp.weight"),
        ("jamba", _lose_norm, {}, "blk.2.ssm_b_norm.weight"),
        ("glm4moe", _lose_attention, {}, "blk.0.attn_output.weight"),
        ("glm4moe", _add_beyond, {}, "blk.77."),
        ("apertus", _lose_activation, {}, "mlp.act_fn.beta"),
        ("qwen3vl", _add_again, {}, "language_model.model.norm.weight"),
        ("gemma3n", _number_highly, {}, "altup_proj.weight"),
    ],
    ids=["rows", "no embedding", "router", "norm", "attention", "layer", "activation", "twice", "number"],
)
def test_tensors_that_would_be_lost_are_refused_by_name(
    family: str, change: Callable[[Tensors], None], settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_family(family, tmp_path)
    edit_model(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None) if settings else None)
    edit_model(tmp_path, change, **settings)
    with pytest.raises(GGUFExportError, match=re.escape(named)) as caught:
        plan_file(tmp_path)
    assert caught.value.reason == "GGUF_INVALID"


@pytest.mark.parametrize(
    ("family", "settings", "key"),
    [
        ("gemma4", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 1e9}}}, "partial_rotary_factor"),
        ("gemma3n", {"vocab_size": 2**31 - 1}, "vocab_size_per_layer_input"),
    ],
)
def test_no_number_makes_a_list_without_end(family: str, settings: dict[str, Any], key: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    edit_model(tmp_path, lambda _: None, **settings)
    with pytest.raises(GGUFExportError, match=f"^{key} is ") as caught:
        plan_file(tmp_path)
    assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize(
    ("value", "said"),
    [(1 << 32, "UINT32"), (-(1 << 32), "UINT32"), (1e39, "FLOAT32"), ((1, 1 << 31), "INT32")],
    ids=str,
)
def test_a_number_beyond_its_type_is_named(value: Any, said: str) -> None:
    with pytest.raises(GGUFExportError, match=rf"^llama\.context_length would be .* {said} of a GGUF file") as caught:
        header([field_of("llama.context_length", value)], [])
    assert caught.value.reason == "BASE_MODEL_INVALID"
