"""MiniCPM 3."""

from __future__ import annotations

from support.models.gguf_family import LATENT_LAYERS, Family, of
from support.models.gguf_sizes import LATENT, longrope

_WIDE = 512
"""llama.cpp divides the inputs of MiniCPM's head by a 256th of it."""

FAMILIES = {
    "minicpm3": Family(
        of("MiniCPM3Config", "MiniCPM3ForCausalLM", **LATENT, hidden_size=_WIDE),
        refused=(
            ({"scale_emb": 1}, "scale_emb"),
            ({"scale_depth": None}, "scale_depth"),
            ({"q_lora_rank": None}, "q_lora_rank"),
        ),
        untrained=LATENT_LAYERS,
    ),
    "minicpm3-long": Family(
        of(
            "MiniCPM3Config",
            "MiniCPM3ForCausalLM",
            **LATENT,
            hidden_size=_WIDE,
            original_max_position_embeddings=16,
            rope_parameters=longrope(8, 16),
        ),
        untrained=LATENT_LAYERS,
    ),
}
