"""Seed-OSS."""

from __future__ import annotations

from support.models.gguf_family import Family, of

FAMILIES = {
    "seed_oss": Family(
        of("SeedOssConfig", "SeedOssForCausalLM", head_dim=32),
        refused=(({"attention_out_bias": True}, "attention_out_bias"),),
    ),
}
