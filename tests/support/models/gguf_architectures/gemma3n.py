"""Gemma 3n."""

from __future__ import annotations

from support.models.gguf_family import BY_TABLE, Family, of
from support.models.gguf_sizes import VOCABULARY

FAMILIES = {
    "gemma3n": Family(
        of(
            "Gemma3nTextConfig",
            "Gemma3nForCausalLM",
            num_hidden_layers=25,
            num_kv_shared_layers=5,
            head_dim=16,
            intermediate_size=384,
            sliding_window=16,
            vocab_size_per_layer_input=VOCABULARY - 20,
            hidden_size_per_layer_input=256,
        ),
        refused=(
            ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
            ({"activation_sparsity_pattern": [0.0] * 25}, "activation_sparsity_pattern"),
            ({"laurel_rank": 32}, "laurel_rank"),
        ),
        untrained=("per_layer_model_projection", "modality_router", "altup_projections", "altup_unembed"),
        most=10 * BY_TABLE,
    ),
}
