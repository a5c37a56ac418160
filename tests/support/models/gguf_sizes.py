"""Sizes, scalings and settings of tiny models that are written as GGUF, which several architectures share. Data."""

from __future__ import annotations

from typing import Any

VOCABULARY = 320
"""More rows than the tokenizer has tokens, as in many models."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "pad_token_id": None,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}
FIRST_DENSE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
ROUTED: dict[str, Any] = {**FIRST_DENSE, "n_shared_experts": 2, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
WINDOWS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 16, "layer_types": KINDS}
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""Of models that take images, which add shares of axes."""
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def longrope(width: int, original: int) -> dict[str, Any]:
    """Return LongRoPE for heads of this width, of which the texts were so long before."""
    short = [1.0 + 0.05 * index for index in range(width // 2)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        "short_factor": short,
        "long_factor": [2 * factor for factor in short],
    }
