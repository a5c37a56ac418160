"""Makers of a tiny model for mixtures of experts with attention in all layers. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.models.gguf_sizes import EXPERTS, GRANITE, LLAMA3, YARN, of

_FIRST_DENSE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_ROUTED: dict[str, Any] = {**_FIRST_DENSE, "n_shared_experts": 2, "norm_topk_prob": True}
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
_LATENT: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_V2: dict[str, Any] = {
    **{key: value for key, value in _ROUTED.items() if key != "norm_topk_prob"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}

MIXTURES: dict[str, Callable[[], Any]] = {
    "qwen2moe": of("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3moe": of("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **EXPERTS, head_dim=32, norm_topk_prob=True),
    "mixtral": of(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "llama4": of("Llama4TextConfig", "Llama4ForCausalLM", **LLAMA_4, rope_parameters=_SCOUT_ROPE),
    "llama4-experts": of(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        # With all experts rounding chooses no other ones, however long the text.
        **LLAMA_4 | {"interleave_moe_layer_step": 1, "num_experts_per_tok": 4, "num_hidden_layers": 4},
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    ),
    "granitemoe": of(
        "GraniteMoeConfig", "GraniteMoeForCausalLM", **GRANITE, num_local_experts=4, num_experts_per_tok=2
    ),
    "olmoe": of("OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, num_key_value_heads=4),
    "gpt-oss": of(
        "GptOssConfig",
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        sliding_window=16,
        num_hidden_layers=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gpt-oss-yarn": of(
        "GptOssConfig",
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        sliding_window=16,
        num_hidden_layers=4,
        rope_parameters={**YARN, "truncate": True},
    ),
    "deepseek2": of("DeepseekV3Config", "DeepseekV3ForCausalLM", **_FIRST_DENSE, **_LATENT),
    "deepseek2-yarn": of(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        **_FIRST_DENSE,
        **_LATENT,
        rope_parameters={**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
    ),
    "deepseek-v3-direct": of(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", **_V2, q_lora_rank=None, n_group=1, topk_group=1
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
    "deepseek-v2-lite": of(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", **_V2 | {"num_hidden_layers": 27}, q_lora_rank=None
    ),
    "glm4moe": of(
        "Glm4MoeConfig", "Glm4MoeForCausalLM", **_FIRST_DENSE, head_dim=32, use_qk_norm=True, attention_bias=True
    ),
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
}
