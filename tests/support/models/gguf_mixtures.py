"""Makers of a tiny model for mixtures of experts beside the families of Qwen, Mixtral, DeepSeek and GLM, and for models without attention. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.models.gguf_sizes import of

_ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}

_PURE: dict[str, Any] = {"state_size": 16, "num_hidden_layers": 3}
"""Sizes of models without attention."""

MIXTURES: dict[str, Callable[[], Any]] = {
    "dots1": of("Dots1Config", "Dots1ForCausalLM", **_ROUTED, num_key_value_heads=4, head_dim=16, sliding_window=None),
    "minimax-m2": of(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        rotary_dim=16,
    ),
    "ernie4_5-moe": of(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        num_hidden_layers=3,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
    ),
    "hunyuan-moe": of(
        "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", num_experts=4, moe_topk=2, head_dim=16, sep_token_id=4
    ),
    "mamba": of("MambaConfig", "MambaForCausalLM", **_PURE, intermediate_size=128),
    "mamba2": of(
        "Mamba2Config", "Mamba2ForCausalLM", **_PURE, num_heads=8, head_dim=16, n_groups=2, chunk_size=8, expand=2
    ),
}
