"""Classes of decoders with recurrent or convolutional layers, with experts or without. Data, and light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass
from slipway.model.decoders.defaults import GRANITE_EXPERTS

_DELTA_NET: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "num_attention_heads": 16,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Qwen3-Next and after: recurrent layers by the gated delta rule."""
_DELTA_NET_EXPERTS: Mapping[str, Any] = {
    **_DELTA_NET,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_MAMBA_2: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_LFM: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "conv_L_cache": 3,
    "conv_bias": False,
}

UNLIMITED = 1 << 20
"""Most tokens of a text for classes without positions, as llama.cpp's files have it."""

RECURRENT: tuple[DecoderClass, ...] = (
    DecoderClass(
        "Qwen3_5ForCausalLM",
        {**_DELTA_NET, "num_key_value_heads": 4},
        norm_offset=1.0,
        by_layer=True,
    ),
    DecoderClass(
        "Qwen3_5MoeForCausalLM",
        {**_DELTA_NET_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        norm_offset=1.0,
        by_layer=True,
    ),
    DecoderClass(
        "Qwen3NextForCausalLM",
        {**_DELTA_NET_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        norm_offset=1.0,
        by_layer=True,
    ),
    DecoderClass(
        "Lfm2ForCausalLM",
        {**_LFM, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
        by_layer=True,
    ),
    DecoderClass(
        "Lfm2MoeForCausalLM",
        {
            **_LFM,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        by_layer=True,
    ),
    DecoderClass(
        "GraniteMoeHybridForCausalLM",
        {**GRANITE_EXPERTS, **_MAMBA_2, "shared_intermediate_size": 1024},
        by_layer=True,
    ),
    DecoderClass(
        "FalconH1ForCausalLM",
        {
            **_MAMBA_2,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "key_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
        by_layer=True,
    ),
    DecoderClass(
        "NemotronHForCausalLM",
        {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        by_layer=True,
    ),
    DecoderClass(
        "JambaForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        by_layer=True,
    ),
    DecoderClass(
        "MambaForCausalLM",
        {
            "layer_norm_epsilon": 1e-5,
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "tie_word_embeddings": True,
        },
        positions=UNLIMITED,
        attends=False,
        by_layer=True,
    ),
    DecoderClass(
        "Mamba2ForCausalLM",
        {
            "layer_norm_epsilon": 1e-5,
            "state_size": 128,
            "conv_kernel": 4,
            "expand": 2,
            "n_groups": 8,
            "num_heads": 128,
        },
        positions=UNLIMITED,
        attends=False,
        by_layer=True,
        width="state_size",
    ),
)
