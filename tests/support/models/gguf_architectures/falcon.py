"""Falcon."""

from __future__ import annotations

from support.models.gguf_family import BY_TABLE, Family, of

FAMILIES = {
    "falcon": Family(
        of("FalconConfig", "FalconForCausalLM"),
        refused=(
            ({"alibi": True}, "alibi"),
            ({"parallel_attn": False}, "parallel_attn"),
        ),
        most=BY_TABLE,
    ),
    "falcon-groups": Family(
        of("FalconConfig", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2), most=BY_TABLE
    ),
    "falcon-one-norm": Family(
        of(
            "FalconConfig",
            "FalconForCausalLM",
            new_decoder_architecture=True,
            num_kv_heads=4,
            num_ln_in_parallel_attn=1,
            ffn_hidden_size=96,
        ),
        most=BY_TABLE,
    ),
}
