"""Jais 2."""

from __future__ import annotations

from support.models.gguf_family import Family, of

FAMILIES = {
    "jais2": Family(
        of("Jais2Config", "Jais2ForCausalLM", head_dim=32), refused=(({"attention_bias": False}, "attention_bias"),)
    ),
}
