"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from support.models.gguf_family import OTHER_PARTS, Family, of, of_parts
from support.models.gguf_sizes import EXPERTS, MROPE, QWEN_VISION

FAMILIES = {
    "qwen2": Family(of("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=False)),
    "qwen2moe": Family(of("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=64)),
    "qwen2vl": Family(
        of_parts(
            "Qwen2_5_VL", {"rms_norm_eps": 1e-12, "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3]}}, QWEN_VISION
        ),
        untrained=OTHER_PARTS,
    ),
}
