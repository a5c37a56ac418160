"""Mistral, and Mixtral."""

from __future__ import annotations

from support.models.gguf_family import OTHER_PARTS, Family, of, of_parts
from support.models.gguf_sizes import SIGLIP, YARN

_MINISTRAL_ROPE = {
    **YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_PIXTRAL = {**SIGLIP, "model_type": "pixtral"}

FAMILIES = {
    "mistral": Family(of("MistralConfig", "MistralForCausalLM", head_dim=32, sliding_window=None)),
    "mistral3": Family(
        of(
            "Ministral3Config",
            "Ministral3ForCausalLM",
            head_dim=32,
            rope_parameters=_MINISTRAL_ROPE,
        ),
        refused=(({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),),
    ),
    "mistral3-text-part": Family(
        of_parts(
            "Mistral3", {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _MINISTRAL_ROPE}, _PIXTRAL
        ),
        untrained=OTHER_PARTS,
    ),
    "mixtral": Family(
        of("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
}
