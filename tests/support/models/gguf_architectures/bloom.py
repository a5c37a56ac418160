"""BLOOM."""

from __future__ import annotations

from support.models.gguf_family import BY_TABLE, Family, of

FAMILIES = {
    "bloom": Family(
        of("BloomConfig", "BloomForCausalLM"),
        refused=(({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),),
        most=BY_TABLE,
    ),
    "bloom-uneven": Family(of("BloomConfig", "BloomForCausalLM", hidden_size=96, num_attention_heads=6), most=BY_TABLE),
}
