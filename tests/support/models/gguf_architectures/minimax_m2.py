"""MiniMax-M2."""

from __future__ import annotations

from support.models.gguf_family import Family, of

FAMILIES = {
    "minimax-m2": Family(
        of(
            "MiniMaxM2Config",
            "MiniMaxM2ForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=32,
            rotary_dim=16,
        )
    ),
}
