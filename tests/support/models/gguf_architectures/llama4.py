"""Llama 4."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import OF_EXPERTS, OTHER_PARTS, Family, of, of_parts
from support.models.gguf_sizes import LLAMA3, SIGLIP

_LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "intermediate_size_mlp": 112,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "rms_norm_eps": 1e-3,
}
"""A Llama 4 with layers of each kind: rotated or not, with experts or without."""
_SCOUT_ROPE = {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
"""The released model blends no frequencies: each is divided, or kept."""
_LLAMA_4_VISION = {
    **SIGLIP,
    "intermediate_size": 128,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}

FAMILIES = {
    "llama4": Family(
        of("Llama4TextConfig", "Llama4ForCausalLM", **_LLAMA_4, rope_parameters=_SCOUT_ROPE),
        refused=(
            ({"attention_chunk_size": 4096}, "attention_chunk_size"),
            ({"attn_temperature_tuning": False}, "attn_temperature_tuning"),
            ({"floor_scale": 4096}, "floor_scale"),
            ({"attn_scale": 0.2}, "attn_scale"),
            ({"attention_bias": True}, "attention_bias"),
            ({"no_rope_layers": [1, 1, 0, 1, 1]}, "no_rope_layers"),
            ({"no_rope_layers": None, "no_rope_layer_interval": 3}, "no_rope_layer_interval"),
            ({"layer_types": ["full_attention"] * 5}, "layer_types"),
            ({"moe_layers": [0, 3]}, "moe_layers"),
            ({"moe_layers": []}, "moe_layers"),
            ({"use_qk_norm": False}, "use_qk_norm"),
            ({"num_local_experts": 128}, "use_qk_norm"),
            ({"attn_temperature_tuning": 0}, "attn_temperature_tuning"),
        ),
        taken=(
            {"attn_temperature_tuning": 4},
            {"attn_temperature_tuning": None},
        ),
        untrained=OF_EXPERTS,
    ),
    "llama4-experts": Family(
        of(
            "Llama4TextConfig",
            "Llama4ForCausalLM",
            # With all experts rounding chooses no other ones, however long the text.
            **_LLAMA_4 | {"interleave_moe_layer_step": 1, "num_experts_per_tok": 4, "num_hidden_layers": 4},
            max_position_embeddings=16384,
            tie_word_embeddings=True,
        ),
        untrained=OF_EXPERTS,
    ),
    "llama4-text-part": Family(
        of_parts("Llama4", _LLAMA_4, _LLAMA_4_VISION), untrained=(*OF_EXPERTS, *OTHER_PARTS, "vision_model")
    ),
}
