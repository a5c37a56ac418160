"""dots.1."""

from __future__ import annotations

from support.models.gguf_family import OF_EXPERTS, Family, of
from support.models.gguf_sizes import ROUTED

FAMILIES = {
    "dots1": Family(
        of("Dots1Config", "Dots1ForCausalLM", **ROUTED, num_key_value_heads=4, head_dim=16, sliding_window=None),
        refused=(
            ({"num_key_value_heads": 2}, "num_key_value_heads"),
            ({"n_group": 2}, "n_group"),
        ),
        untrained=OF_EXPERTS,
    ),
}
