"""Phi."""

from __future__ import annotations

from support.models.gguf_family import BY_TABLE, Family, of
from support.models.gguf_sizes import longrope

FAMILIES = {
    "phi2": Family(
        of("PhiConfig", "PhiForCausalLM"), refused=(({"qk_layernorm": True}, "qk_layernorm"),), most=BY_TABLE
    ),
    "phi3": Family(of("Phi3Config", "Phi3ForCausalLM")),
    "phi3-long": Family(
        of("Phi3Config", "Phi3ForCausalLM", original_max_position_embeddings=16, rope_parameters=longrope(16, 16))
    ),
    "phi3-short": Family(
        of(
            "Phi3Config",
            "Phi3ForCausalLM",
            max_position_embeddings=1024,
            original_max_position_embeddings=512,
            rope_parameters=longrope(16, 512),
        )
    ),
}
