"""Gemma to Gemma 3."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import BY_TABLE, OTHER_PARTS, Family, of, of_parts
from support.models.gguf_sizes import SIGLIP


def layers_with_windows(layers: int, period: int) -> dict[str, Any]:
    """Return settings of a Gemma whose layers have a window, but for the last one of each period."""
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": 16,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
    }


FAMILIES = {
    "gemma": Family(
        of("GemmaConfig", "GemmaForCausalLM", head_dim=32),
        refused=(
            ({"tie_word_embeddings": False}, "tie_word_embeddings"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ),
        most=BY_TABLE,
    ),
    "gemma2": Family(of("Gemma2Config", "Gemma2ForCausalLM", **layers_with_windows(4, 2)), most=BY_TABLE),
    "gemma3": Family(of("Gemma3TextConfig", "Gemma3ForCausalLM", **layers_with_windows(7, 6)), most=BY_TABLE),
    "gemma3-text-part": Family(
        of_parts("Gemma3", layers_with_windows(7, 6), SIGLIP), untrained=OTHER_PARTS, most=BY_TABLE
    ),
}
