"""GLM-4.7-Flash, a GLM with latent keys and values."""

from __future__ import annotations

from support.models.gguf_family import EXACT, LATENT_LAYERS, OF_EXPERTS, Family, of
from support.models.gguf_sizes import LATENT, ROUTED

_SIZES = {key: value for key, value in {**ROUTED, **LATENT}.items() if key != "first_k_dense_replace"}

FAMILIES = {
    "glm4-moe-lite": Family(
        of("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", **_SIZES, rms_norm_eps=1e-6),
        refused=(
            ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
            ({"mlp_layer_types": ["dense", "dense", "sparse"]}, "mlp_layer_types"),
            ({"rope_interleave": False}, "rope_interleave"),
            ({"num_hidden_layers": 27, "mlp_layer_types": None}, "q_lora_rank"),
        ),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS),
    ),
    "glm4-moe-lite-direct": Family(
        of("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", **_SIZES | {"q_lora_rank": None, "v_head_dim": 24}),
        untrained=(*OF_EXPERTS, *LATENT_LAYERS, "q_proj"),
        most=5 * EXACT,  # transformers has another epsilon for latent vectors than for states
    ),
}
