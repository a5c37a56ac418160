"""StableLM."""

from __future__ import annotations

from support.models.gguf_family import Family, of

FAMILIES = {
    "stablelm": Family(
        of("StableLmConfig", "StableLmForCausalLM", use_qkv_bias=True),
        refused=(({"tie_word_embeddings": True}, "tie_word_embeddings"),),
    ),
    "stablelm-parallel": Family(
        of(
            "StableLmConfig",
            "StableLmForCausalLM",
            use_parallel_residual=True,
            qk_layernorm=True,
            partial_rotary_factor=0.5,
        ),
        fast=True,
    ),
}
