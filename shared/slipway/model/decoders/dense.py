"""Classes of decoders with attention in all layers and no experts, but for Gemma. Data, and light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway.model.decoders.defaults import GRANITE, LLAMA, QWEN_2, QWEN_3_VL

_QWEN_2_VL: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
}
"""Text parts of models that take images."""
_LAYER_NORM: Mapping[str, str] = {"layer_norm_eps": "layer_norm_epsilon"}
_LLAMA_2: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_GLM: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}


def _all_heads(_: Mapping[str, Any]) -> None:
    """Return nothing: each head has keys and values of its own, whatever settings say."""


def _falcon_heads(settings: Mapping[str, Any]) -> Any:
    """Return the heads of keys of a Falcon: older ones have one or as many as queries, whatever the number says."""
    if settings.get("multi_query") and not settings.get("new_decoder_architecture"):
        return 1
    return settings.get("num_kv_heads")


DENSE: tuple[DecoderClass, ...] = (
    DecoderClass("LlamaForCausalLM", LLAMA),
    DecoderClass(
        "MistralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
        windowed=Windowed.ALWAYS,
    ),
    DecoderClass(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
        windowed=Windowed.ALWAYS,
    ),
    DecoderClass("Qwen2ForCausalLM", QWEN_2, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass("Qwen3ForCausalLM", {**QWEN_2, "head_dim": 128}, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass("Qwen2VLForConditionalGeneration", _QWEN_2_VL, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass("Qwen2_5_VLForConditionalGeneration", _QWEN_2_VL, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass("Qwen3VLForConditionalGeneration", {**QWEN_3_VL, "head_dim": 128}),
    DecoderClass("GraniteForCausalLM", GRANITE),
    DecoderClass(
        "CohereForCausalLM",
        {
            "max_position_embeddings": 8192,
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "logit_scale": 0.0625,
        },
        names=_LAYER_NORM,
    ),
    DecoderClass(
        "Cohere2ForCausalLM",
        {
            "max_position_embeddings": 8192,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=4,
        names=_LAYER_NORM,
    ),
    DecoderClass("OlmoForCausalLM", {"max_position_embeddings": 2048}),
    DecoderClass("Olmo2ForCausalLM", _LLAMA_2),
    DecoderClass(
        "Olmo3ForCausalLM",
        {**_LLAMA_2, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0, "sliding_window": 4096},
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=4,
    ),
    DecoderClass(
        "PhiForCausalLM",
        {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "partial_rotary_factor": 0.5},
        names=_LAYER_NORM,
    ),
    DecoderClass(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windowed=Windowed.ALWAYS,
    ),
    DecoderClass(
        "GPT2LMHeadModel",
        {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        transposed=True,
    ),
    DecoderClass(
        "GPTNeoXForCausalLM",
        {
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        names={**_LAYER_NORM, "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        kv_heads=_all_heads,
    ),
    DecoderClass(
        "GPTBigCodeForCausalLM",
        {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "multi_query": True},
        kv_heads=lambda settings: 1 if settings.get("multi_query") else None,
    ),
    DecoderClass(
        "Starcoder2ForCausalLM",
        {
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        windowed=Windowed.ALWAYS,
        names={"norm_epsilon": "layer_norm_epsilon"},
    ),
    DecoderClass(
        "BloomForCausalLM",
        {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        names={"n_embed": "hidden_size", "seq_length": "max_position_embeddings"},
        kv_heads=_all_heads,
        positions=2048,
    ),
    DecoderClass(
        "FalconForCausalLM",
        {
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
        },
        names={"n_embed": "hidden_size", "ffn_hidden_size": "intermediate_size"},
        kv_heads=_falcon_heads,
    ),
    DecoderClass(
        "MptForCausalLM",
        {"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        names={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        kv_heads=_all_heads,
    ),
    DecoderClass(
        "StableLmForCausalLM",
        {"max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "partial_rotary_factor": 0.25},
        names=_LAYER_NORM,
    ),
    DecoderClass(
        "NemotronForCausalLM",
        {"max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "partial_rotary_factor": 0.5},
        norm_offset=1.0,
        names={"norm_eps": "layer_norm_epsilon"},
    ),
    DecoderClass("GlmForCausalLM", _GLM),
    DecoderClass("Glm4ForCausalLM", _GLM),
    DecoderClass(
        "Ernie4_5ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
    ),
    DecoderClass(
        "Exaone4ForCausalLM",
        {**_LLAMA_2, "num_key_value_heads": 32, "sliding_window": 4096},
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=4,
    ),
    DecoderClass("HunYuanDenseV1ForCausalLM", _LLAMA_2),
    DecoderClass(
        "SeedOssForCausalLM",
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6},
    ),
    DecoderClass(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        windowed=Windowed.ASKED,
        local=Local.UNROTATED,
    ),
    DecoderClass("ArceeForCausalLM", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    DecoderClass(
        "ApertusForCausalLM", {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0}
    ),
    DecoderClass("Jais2ForCausalLM", {"max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5}, names=_LAYER_NORM),
    DecoderClass(
        "MiniCPM3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        width="qk_rope_head_dim",
    ),
    DecoderClass(
        "YoutuForCausalLM",
        {
            "num_key_value_heads": 16,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
        width="qk_rope_head_dim",
    ),
)
"""Each with what its code adds to a ``config.json``; families beside each other."""
