"""ERNIE 4.5."""

from __future__ import annotations

from support.models.gguf_family import OF_EXPERTS, Family, of

FAMILIES = {
    "ernie4_5": Family(
        of("Ernie4_5Config", "Ernie4_5ForCausalLM", head_dim=32), refused=(({"use_bias": True}, "use_bias"),)
    ),
    "ernie4_5-moe": Family(
        of(
            "Ernie4_5_MoeConfig",
            "Ernie4_5_MoeForCausalLM",
            num_hidden_layers=3,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=32,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
        ),
        refused=(({"moe_layer_end_index": 1}, "moe_layer_end_index"),),
        taken=({"moe_layer_end_index": 2},),
        untrained=OF_EXPERTS,
    ),
}
