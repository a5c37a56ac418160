"""Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import LONG_SUMS, OF_EXPERTS, OTHER_PARTS, Family, of, of_parts
from support.models.gguf_sizes import EXPERTS, MROPE, QWEN_VISION

_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED_EXPERT: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 48}
_LINEAR, _FULL = "linear_attention", "full_attention"

FAMILIES = {
    "qwen3next": Family(
        of("Qwen3NextConfig", "Qwen3NextForCausalLM", **_DELTA_NET, **_SHARED_EXPERT),
        refused=(
            ({"norm_topk_prob": False}, "norm_topk_prob"),
            ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ),
        untrained=OF_EXPERTS,
        most=LONG_SUMS,
    ),
    "qwen35": Family(
        of("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **_DELTA_NET, tie_word_embeddings=True),
        refused=(
            ({"linear_value_head_dim": 32}, "linear_value_head_dim"),
            ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
            ({"layer_types": [_FULL, _LINEAR, _LINEAR, _FULL]}, "layer_types"),
            ({"attn_output_gate": False}, "attn_output_gate"),
        ),
        most=LONG_SUMS,
    ),
    "qwen35-text-part": Family(
        of_parts(
            "Qwen3_5",
            {**_DELTA_NET, "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
            QWEN_VISION,
        ),
        untrained=OTHER_PARTS,
        most=LONG_SUMS,
    ),
    "qwen35moe": Family(
        of("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", **_DELTA_NET, **_SHARED_EXPERT), most=LONG_SUMS
    ),
}
