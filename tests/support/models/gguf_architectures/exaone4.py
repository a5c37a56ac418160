"""EXAONE 4."""

from __future__ import annotations

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import KINDS, LLAMA3

FAMILIES = {
    "exaone4": Family(
        of(
            "Exaone4Config",
            "Exaone4ForCausalLM",
            sliding_window=None,
            layer_types=["full_attention"] * 2,
            rope_parameters=LLAMA3,
        ),
        refused=(
            ({"num_hidden_layers": 64}, "sliding_window"),
            ({"sliding_window": 16}, "num_hidden_layers"),
        ),
    ),
    "exaone4-windows": Family(
        of("Exaone4Config", "Exaone4ForCausalLM", num_hidden_layers=64, layer_types=KINDS * 16, sliding_window=16)
    ),
}
