"""MPT."""

from __future__ import annotations

from support.models.gguf_family import BY_TABLE, Family, of

FAMILIES = {
    "mpt": Family(
        of("MptConfig", "MptForCausalLM", num_attention_heads=6, hidden_size=96, attn_config={"clip_qkv": 0.5}),
        refused=(
            ({"attn_config": {"softmax_scale": 0.1}}, "softmax_scale"),
            ({"no_bias": False}, "no_bias"),
        ),
        most=BY_TABLE,
    ),
}
