"""Gemma 4."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import BY_TABLE, Family, of, of_parts
from support.models.gguf_sizes import VOCABULARY

_GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}

FAMILIES = {
    "gemma4": Family(
        of("Gemma4TextConfig", "Gemma4ForCausalLM", **_GEMMA_4, num_kv_shared_layers=2, use_double_wide_mlp=True),
        refused=(
            ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
            ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}, "per_layer_config"),
            ({"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config"),
            ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
            ({"rope_parameters": {"full_attention": "proportional"}}, "rope_parameters"),
        ),
        untrained=("per_layer_model_projection",),
        most=BY_TABLE,
    ),
    "gemma4-experts": Family(
        of(
            "Gemma4TextConfig",
            "Gemma4ForCausalLM",
            **_GEMMA_4 | {"hidden_size_per_layer_input": 0},
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            final_logit_softcapping=5.0,
        ),
        most=BY_TABLE,
    ),
    "gemma4-text-part": Family(
        of_parts("Gemma4", {**_GEMMA_4, "num_kv_shared_layers": 2, "pad_token_id": 0}, None),
        untrained=("per_layer_model_projection",),
        most=BY_TABLE,
    ),
}
