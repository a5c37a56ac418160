"""OLMo."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import WINDOWS, YARN


def _olmo3_rope(full: dict[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding that is scaled in layers without a window."""
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]}}


FAMILIES = {
    "olmo": Family(of("OlmoConfig", "OlmoForCausalLM", clip_qkv=0.5), refused=(({"head_dim": 32}, "head_dim"),)),
    "olmo2": Family(
        of("Olmo2Config", "Olmo2ForCausalLM"), refused=(({"tie_word_embeddings": True}, "tie_word_embeddings"),)
    ),
    "olmo3": Family(
        of("Olmo3Config", "Olmo3ForCausalLM", **WINDOWS, rope_parameters=_olmo3_rope(YARN)),
        refused=(({"rope_parameters": {"sliding_attention": {"rope_theta": 1e6}}}, "rope_theta"),),
    ),
    "olmoe": Family(
        of("OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, num_key_value_heads=4),
        refused=(
            ({"num_key_value_heads": 2}, "num_key_value_heads"),
            ({"clip_qkv": 8.0}, "clip_qkv"),
        ),
    ),
}
