"""Nemotron-H."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import Family, of

_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 32,
    "time_step_min": 1e-7,  # transformers makes shorter steps as long as this, and llama.cpp does not
}

FAMILIES = {
    "nemotron_h": Family(
        of("NemotronHConfig", "NemotronHForCausalLM", **_NEMOTRON, hybrid_override_pattern="M-*M-"),
        refused=(
            ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
            ({"time_step_min": 0.1}, "time_step_min"),
        ),
        untrained=("out_proj",),
    ),
    "nemotron_h_moe": Family(
        of(
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
        refused=(
            ({"moe_latent_size": 16}, "moe_latent_size"),
            ({"layers_block_type": ["moe", "mlp", "linear_attention"]}, "layers_block_type"),
        ),
        untrained=("out_proj",),
    ),
}
