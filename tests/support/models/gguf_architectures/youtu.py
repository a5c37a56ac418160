"""Youtu."""

from __future__ import annotations

from support.models.gguf_family import LATENT_LAYERS, Family, of
from support.models.gguf_sizes import LATENT

FAMILIES = {
    "youtu": Family(
        of("YoutuConfig", "YoutuForCausalLM", **LATENT),
        refused=(({"rope_interleave": False}, "rope_interleave"),),
        untrained=LATENT_LAYERS,
    ),
}
