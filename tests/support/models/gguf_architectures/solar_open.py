"""Upstage's Solar Open."""

from __future__ import annotations

from support.models.gguf_family import OF_EXPERTS, Family, of
from support.models.gguf_sizes import YARN

_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES = {
    "solar-open": Family(
        of(
            "SolarOpenConfig",
            "SolarOpenForCausalLM",
            **_EXPERTS,
            head_dim=32,
            routed_scaling_factor=1.5,
            rope_parameters=YARN,
            attention_bias=True,
        ),
        refused=(
            ({"n_group": 2}, "n_group"),
            ({"first_k_dense_replace": 1}, "first_k_dense_replace"),
            ({"use_qk_norm": True}, "use_qk_norm"),
        ),
        untrained=OF_EXPERTS,
    ),
}
