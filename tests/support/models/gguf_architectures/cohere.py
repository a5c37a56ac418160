"""Cohere's Command."""

from __future__ import annotations

from support.models.gguf_family import Family, of

FAMILIES = {
    "command-r": Family(
        of("CohereConfig", "CohereForCausalLM", logit_scale=0.3),
        refused=(
            ({"tie_word_embeddings": False}, "tie_word_embeddings"),
            ({"use_qk_norm": True}, "use_qk_norm"),
        ),
    ),
    "command-r-plus": Family(
        of("CohereConfig", "CohereForCausalLM", logit_scale=0.3, use_qk_norm=True, num_hidden_layers=64)
    ),
    "cohere2": Family(
        of("Cohere2Config", "Cohere2ForCausalLM", logit_scale=0.3, num_hidden_layers=5, sliding_window=16),
        refused=(
            ({"sliding_window": None}, "sliding_window"),
            ({"layer_types": None, "sliding_window_pattern": 2}, "sliding_window_pattern"),
        ),
    ),
}
