"""Granite."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import GRANITE

_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}

FAMILIES = {
    "granite": Family(of("GraniteConfig", "GraniteForCausalLM", **GRANITE)),
    "granitemoe": Family(
        of("GraniteMoeConfig", "GraniteMoeForCausalLM", **GRANITE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "granitehybrid": Family(
        of(
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
        refused=(
            ({"mamba_proj_bias": True}, "mamba_proj_bias"),
            ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
            ({"mamba_conv_bias": False}, "mamba_conv_bias"),
        ),
    ),
    "granitehybrid-dense": Family(
        of(
            "GraniteMoeHybridConfig",
            "GraniteMoeHybridForCausalLM",
            **_MAMBA,
            **GRANITE,
            num_local_experts=0,
            shared_intermediate_size=80,
            position_embedding_type="rope",
            layer_types=["mamba", "attention", "mamba"],
            num_hidden_layers=3,
        )
    ),
    "granite-4-attention": Family(
        of(
            "GraniteMoeHybridConfig",
            "GraniteMoeHybridForCausalLM",
            **GRANITE,
            num_local_experts=0,
            shared_intermediate_size=80,
            layer_types=["attention"] * 2,
            tie_word_embeddings=True,
        )
    ),
    "granite-4-attention-experts": Family(
        of(
            "GraniteMoeHybridConfig",
            "GraniteMoeHybridForCausalLM",
            **GRANITE,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            position_embedding_type="rope",
            layer_types=["attention"] * 2,
        ),
        refused=(({"position_embedding_type": "nope"}, "position_embedding_type"),),
    ),
}
