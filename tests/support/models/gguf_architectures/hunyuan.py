"""HunYuan."""

from __future__ import annotations

from support.models.gguf_family import OF_EXPERTS, Family, of

FAMILIES = {
    "hunyuan-dense": Family(
        of(
            "HunYuanDenseV1Config",
            "HunYuanDenseV1ForCausalLM",
            head_dim=32,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        ),
        refused=(({"attention_bias": True}, "attention_bias"),),
    ),
    "hunyuan-moe": Family(
        of("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", num_experts=4, moe_topk=2, head_dim=16, sep_token_id=4),
        refused=(({"moe_topk": [2, 1]}, "moe_topk"),),
        taken=({"moe_topk": [2, 2]},),
        untrained=OF_EXPERTS,
    ),
}
