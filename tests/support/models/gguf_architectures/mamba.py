"""Mamba."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import Family, of

_PURE: dict[str, Any] = {"state_size": 16, "num_hidden_layers": 3}

FAMILIES = {
    "mamba": Family(
        of("MambaConfig", "MambaForCausalLM", **_PURE, intermediate_size=128),
        refused=(
            ({"intermediate_size": 96}, "intermediate_size"),
            ({"expand": 3}, "expand"),
        ),
        taken=({"intermediate_size": None},),
        untrained=("out_proj", "dt_proj"),
    ),
    "mamba2": Family(
        of("Mamba2Config", "Mamba2ForCausalLM", **_PURE, num_heads=8, head_dim=16, n_groups=2, chunk_size=8, expand=2),
        refused=(({"time_step_limit": [0.1, 1.0]}, "time_step_limit"),),
        untrained=("out_proj",),
    ),
}
