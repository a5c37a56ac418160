"""Makers of a tiny model for decoders with recurrent or convolutional layers, and for Granite 4, some of which have none. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.models.gguf_sizes import EXPERTS, GRANITE, of

DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED_EXPERT: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 48}
_CONVOLUTION: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 32,
    "time_step_min": 1e-7,  # transformers makes shorter steps as long as this, and llama.cpp does not
}
_PURE: dict[str, Any] = {"state_size": 16, "num_hidden_layers": 3}
"""Sizes of models without attention."""
_JAMBA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 6,
    "mamba_d_conv": 3,
    "rms_norm_eps": 1e-3,
}
"""A Jamba with recurrent layers and attention."""

RECURRENT: dict[str, Callable[[], Any]] = {
    "qwen35": of("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **DELTA_NET, tie_word_embeddings=True),
    "qwen35moe": of("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", **DELTA_NET, **_SHARED_EXPERT),
    "qwen3next": of("Qwen3NextConfig", "Qwen3NextForCausalLM", **DELTA_NET, **_SHARED_EXPERT),
    "lfm2": of("Lfm2Config", "Lfm2ForCausalLM", **_CONVOLUTION, block_multiple_of=32),
    "lfm2moe": of(
        "Lfm2MoeConfig", "Lfm2MoeForCausalLM", **_CONVOLUTION, **EXPERTS, num_dense_layers=1, use_expert_bias=True
    ),
    "granitehybrid": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **_MAMBA,
        **GRANITE,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention", "mamba"],
        num_hidden_layers=3,
    ),
    "granitehybrid-dense": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **_MAMBA,
        **GRANITE,
        num_local_experts=0,
        shared_intermediate_size=80,
        position_embedding_type="rope",
        layer_types=["mamba", "attention", "mamba"],
        num_hidden_layers=3,
    ),
    "granite-4-attention": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **GRANITE,
        num_local_experts=0,
        shared_intermediate_size=80,
        layer_types=["attention"] * 2,
        tie_word_embeddings=True,
    ),
    "granite-4-attention-experts": of(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        **GRANITE,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        position_embedding_type="rope",
        layer_types=["attention"] * 2,
    ),
    "falcon-h1": of(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        **_MAMBA,
        mamba_d_ssm=128,
        head_dim=32,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.9,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.8,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        mlp_multipliers=[0.8, 1.25],
        embedding_multiplier=5.0,
        lm_head_multiplier=0.6,
    ),
    "nemotron_h": of("NemotronHConfig", "NemotronHForCausalLM", **_NEMOTRON, hybrid_override_pattern="M-*M-"),
    "nemotron_h_moe": of(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        **_NEMOTRON,
        hybrid_override_pattern="ME*ME",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        routed_scaling_factor=1.5,
    ),
    "jamba": of(
        "JambaConfig",
        "JambaForCausalLM",
        **_JAMBA,
        num_experts=4,
        expert_layer_period=3,
        expert_layer_offset=2,
    ),
    "jamba-dense": of("JambaConfig", "JambaForCausalLM", **_JAMBA, num_experts=1, tie_word_embeddings=True),
    "mamba": of("MambaConfig", "MambaForCausalLM", **_PURE, intermediate_size=128),
    "mamba2": of(
        "Mamba2Config", "Mamba2ForCausalLM", **_PURE, num_heads=8, head_dim=16, n_groups=2, chunk_size=8, expand=2
    ),
}
