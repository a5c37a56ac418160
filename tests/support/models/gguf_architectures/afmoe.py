"""Arcee's mixtures (AFMoE, Trinity)."""

from __future__ import annotations

from support.models.gguf_family import OF_EXPERTS, Family, of
from support.models.gguf_sizes import EXPERTS

FAMILIES = {
    "afmoe": Family(
        of(
            "AfmoeConfig",
            "AfmoeForCausalLM",
            **EXPERTS,
            num_hidden_layers=5,
            head_dim=32,
            sliding_window=16,
            num_shared_experts=2,
            route_scale=1.5,
            mup_enabled=True,
        ),
        refused=(
            ({"mup_enabled": False}, "mup_enabled"),
            ({"mup_enabled": None}, "mup_enabled"),
            ({"attention_bias": True}, "attention_bias"),
            ({"global_attn_every_n_layers": 2}, "global_attn_every_n_layers"),
            ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ),
        untrained=(*OF_EXPERTS, "router"),
    ),
}
