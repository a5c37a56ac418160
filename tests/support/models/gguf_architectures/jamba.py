"""Jamba."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import OF_EXPERTS, Family, of

_JAMBA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 6,
    "mamba_d_conv": 3,
    "rms_norm_eps": 1e-3,
}

FAMILIES = {
    "jamba": Family(
        of(
            "JambaConfig",
            "JambaForCausalLM",
            **_JAMBA,
            num_experts=4,
            expert_layer_period=3,
            expert_layer_offset=2,
        ),
        refused=(
            ({"mamba_expand": 3}, "mamba_expand"),
            ({"mamba_conv_bias": False}, "mamba_conv_bias"),
            ({"mamba_proj_bias": True}, "mamba_proj_bias"),
            ({"hidden_act": "gelu"}, "hidden_act"),
        ),
        untrained=(*OF_EXPERTS, "out_proj", "dt_proj"),
    ),
    "jamba-dense": Family(
        of("JambaConfig", "JambaForCausalLM", **_JAMBA, num_experts=1, tie_word_embeddings=True),
        refused=(({"head_dim": 32}, "head_dim"),),
        untrained=("out_proj", "dt_proj"),
    ),
}
