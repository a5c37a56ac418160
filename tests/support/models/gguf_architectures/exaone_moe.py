"""EXAONE with experts (K-EXAONE)."""

from __future__ import annotations

from support.models.gguf_family import OF_EXPERTS, Family, of
from support.models.gguf_sizes import EXPERTS, KINDS

FAMILIES = {
    "exaone-moe": Family(
        of(
            "ExaoneMoeConfig",
            "ExaoneMoeForCausalLM",
            **EXPERTS,
            num_hidden_layers=5,
            sliding_window=16,
            layer_types=[*KINDS, "full_attention"],
            num_shared_experts=2,
            routed_scaling_factor=1.5,
        ),
        refused=(
            ({"n_group": 2}, "n_group"),
            ({"layer_types": None, "sliding_window_pattern": 2}, "sliding_window_pattern"),
            ({"sliding_window": None}, "sliding_window"),
            ({"mlp_layer_types": ["sparse"] * 5}, "mlp_layer_types"),
            ({"hidden_act": "gelu"}, "hidden_act"),
        ),
        taken=({"sliding_window_pattern": "LLLG"},),
        untrained=OF_EXPERTS,
    ),
}
