"""Classes of decoders in transformers, and what their code adds to a ``config.json``. Data, and light.

A new class is one entry here. Formats that write a model in a form of their own say in their tables which of these they write, and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.dense import DENSE
from slipway.model.decoders.kinds import DecoderClass, Local, Windowed
from slipway.model.decoders.mixtures import MIXTURES
from slipway.model.decoders.recurrent import GRANITE, LLAMA, RECURRENT

__all__ = ["CLASSES", "DecoderClass", "Local", "Windowed"]

_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_QWEN_DENSE: Mapping[str, Any] = {**_QWEN, "max_window_layers": 28}
_GEMMA: Mapping[str, Any] = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "head_dim": 256,
}
_GEMMA_2: Mapping[str, Any] = {
    **_GEMMA,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}

_QWEN_2_VL: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
}
_QWEN_3_VL: Mapping[str, Any] = {
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}
"""Text parts of models that take images."""

_CLASSES = (
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
    DecoderClass("Qwen2ForCausalLM", _QWEN_DENSE, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass(
        "Qwen2MoeForCausalLM",
        {**_QWEN_DENSE, "num_experts": 60, "num_experts_per_tok": 4},
        windowed=Windowed.ASKED,
        local=Local.FIRST_ODD,
    ),
    DecoderClass("Qwen3ForCausalLM", {**_QWEN_DENSE, "head_dim": 128}, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass(
        "Qwen3MoeForCausalLM",
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        windowed=Windowed.ASKED,
    ),
    DecoderClass("GemmaForCausalLM", {**_GEMMA, "num_key_value_heads": 16}, norm_offset=1.0),
    DecoderClass(
        "Gemma2ForCausalLM",
        {**_GEMMA_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=2,
        norm_offset=1.0,
    ),
    DecoderClass(
        "Gemma3ForCausalLM",
        {
            **_GEMMA_2,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=6,
        norm_offset=1.0,
    ),
    DecoderClass(
        "Gemma3nForCausalLM",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "rope_theta": 1_000_000.0,
            "final_logit_softcapping": 30.0,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 15,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "laurel_rank": 64,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=5,
    ),
    DecoderClass(
        "Gemma4ForCausalLM",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": False,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD_AND_LAST,
        period=6,
        by_layer=True,
    ),
    DecoderClass(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windowed=Windowed.ALWAYS,
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
    DecoderClass("GraniteForCausalLM", GRANITE),
    DecoderClass("Qwen2VLForConditionalGeneration", _QWEN_2_VL, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass("Qwen2_5_VLForConditionalGeneration", _QWEN_2_VL, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass("Qwen3VLForConditionalGeneration", {**_QWEN_3_VL, "head_dim": 128}),
    DecoderClass(
        "Qwen3VLMoeForConditionalGeneration",
        {
            **_QWEN_3_VL,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
    ),
    DecoderClass(
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windowed=Windowed.ALWAYS,
    ),
    DecoderClass(
        "OlmoeForCausalLM",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
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
    DecoderClass(
        "Glm4MoeForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    DecoderClass(
        "GptOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=2,
    ),
    DecoderClass(
        "DeepseekV3ForCausalLM",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
        width="qk_rope_head_dim",
    ),
    DecoderClass(
        "GPT2LMHeadModel",
        {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        transposed=True,
    ),
    *DENSE,
    *MIXTURES,
    *RECURRENT,
)
CLASSES: Mapping[str, DecoderClass] = {each.name: each for each in _CLASSES}
"""By name."""
