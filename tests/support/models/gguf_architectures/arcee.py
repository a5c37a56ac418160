"""Arcee's AFM."""

from __future__ import annotations

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import YARN

FAMILIES = {
    "arcee": Family(
        of("ArceeConfig", "ArceeForCausalLM", head_dim=32, rope_parameters={**YARN, "mscale": 1.0}),
        refused=(({"mlp_bias": True}, "mlp_bias"),),
    ),
}
