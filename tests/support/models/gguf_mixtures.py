"""Makers of a tiny model for mixtures of experts beside the families of Qwen, Mixtral, DeepSeek and GLM, and for models without attention. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.models.gguf_sizes import LLAMA3, YARN, of

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

LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "intermediate_size_mlp": 112,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "rms_norm_eps": 1e-3,
}
"""A Llama 4 with layers of each kind: rotated or not, with experts or without."""
_SCOUT_ROPE = {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
"""The released model blends no frequencies: each is divided, or kept."""

_V2: dict[str, Any] = {
    **{key: value for key, value in _ROUTED.items() if key != "norm_topk_prob"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
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

MIXTURES: dict[str, Callable[[], Any]] = {
    "dots1": of("Dots1Config", "Dots1ForCausalLM", **_ROUTED, num_key_value_heads=4, head_dim=16, sliding_window=None),
    "llama4": of("Llama4TextConfig", "Llama4ForCausalLM", **LLAMA_4, rope_parameters=_SCOUT_ROPE),
    "llama4-experts": of(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        # With all experts rounding chooses no other ones, however long the text.
        **LLAMA_4 | {"interleave_moe_layer_step": 1, "num_experts_per_tok": 4, "num_hidden_layers": 4},
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    ),
    "deepseek-v2": of(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        **_V2,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,  # as many as experts, which is no limit
        norm_topk_prob=True,  # which the class does not read
    ),
    "deepseek-v2-direct": of(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        **_V2,
        q_lora_rank=None,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v3-direct": of(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", **_V2, q_lora_rank=None, n_group=1, topk_group=1
    ),
    "deepseek-v2-lite": of(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", **_V2 | {"num_hidden_layers": 27}, q_lora_rank=None
    ),
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
