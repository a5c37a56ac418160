"""Nemotron."""

from __future__ import annotations

from support.models.gguf_family import Family, of

FAMILIES = {
    "nemotron": Family(
        of("NemotronConfig", "NemotronForCausalLM", attention_bias=True, mlp_bias=True),
        refused=(
            ({"hidden_act": "silu"}, "hidden_act"),
            ({"head_dim": 32}, "head_dim"),
        ),
    ),
}
