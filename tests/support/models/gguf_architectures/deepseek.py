"""DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import LATENT_LAYERS, OF_EXPERTS, Family, of
from support.models.gguf_sizes import FIRST_DENSE, LATENT, ROUTED, YARN

_GROUPS = {"n_group": 4, "topk_group": 2}
_V2: dict[str, Any] = {
    **{key: value for key, value in ROUTED.items() if key != "norm_topk_prob"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}

FAMILIES = {
    "deepseek2": Family(
        of("DeepseekV3Config", "DeepseekV3ForCausalLM", **FIRST_DENSE, **_GROUPS, **LATENT),
        refused=(
            ({"rope_interleave": False}, "rope_interleave"),
            ({"num_hidden_layers": 27}, "q_lora_rank"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "mscale"),
        ),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS),
    ),
    "deepseek2-yarn": Family(
        of(
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            **FIRST_DENSE,
            **_GROUPS,
            **LATENT,
            rope_parameters={**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
        ),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS),
    ),
    "deepseek-v3-direct": Family(
        of("DeepseekV3Config", "DeepseekV3ForCausalLM", **_V2, q_lora_rank=None, n_group=1, topk_group=1),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS, "q_proj"),
    ),
    "deepseek-v2": Family(
        of(
            "DeepseekV2Config",
            "DeepseekV2ForCausalLM",
            **_V2,
            q_lora_rank=24,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,  # as many as experts, which is no limit
            norm_topk_prob=True,  # which the class does not read
        ),
        refused=(
            ({"num_hidden_layers": 26}, "q_lora_rank"),
            ({"num_hidden_layers": 48, "vocab_size": 128256}, "q_lora_rank"),
            ({"n_group": 4, "topk_group": 1}, "topk_group"),
            ({"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}, "topk_group"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
            ({"mlp_bias": True}, "mlp_bias"),
        ),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS),
    ),
    "deepseek-v2-direct": Family(
        of(
            "DeepseekV2Config",
            "DeepseekV2ForCausalLM",
            **_V2,
            q_lora_rank=None,
            rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS, "q_proj"),
    ),
    "deepseek-v2-lite": Family(
        of("DeepseekV2Config", "DeepseekV2ForCausalLM", **_V2 | {"num_hidden_layers": 27}, q_lora_rank=None),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS, "q_proj"),
    ),
}
