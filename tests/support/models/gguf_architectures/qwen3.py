"""Qwen3."""

from __future__ import annotations

from support.models.gguf_family import OTHER_PARTS, Family, of, of_parts
from support.models.gguf_sizes import EXPERTS, MROPE, QWEN_VISION, YARN

FAMILIES = {
    "qwen3": Family(of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=True), fast=True),
    "qwen3-yarn": Family(
        of("Qwen3Config", "Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=False, rope_parameters=YARN)
    ),
    "qwen3moe": Family(of("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **EXPERTS, head_dim=32, norm_topk_prob=True)),
    "qwen3vl": Family(
        of_parts(
            "Qwen3VL",
            {"head_dim": 32, "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5]}},
            {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        ),
        untrained=OTHER_PARTS,
    ),
    "qwen3vlmoe": Family(
        of_parts(
            "Qwen3VLMoe",
            {**EXPERTS, "head_dim": 32, "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5]}},
            {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        ),
        untrained=OTHER_PARTS,
    ),
}
