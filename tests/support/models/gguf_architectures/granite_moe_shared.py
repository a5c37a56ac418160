"""Granite with experts and one that all tokens share."""

from __future__ import annotations

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import GRANITE

_EXPERTS = {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = {
    "granite-moe-shared": Family(
        of("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", **_EXPERTS, shared_intermediate_size=48),
        refused=(({"hidden_act": "gelu"}, "hidden_act"),),
    ),
    "granite-moe-none-shared": Family(of("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", **_EXPERTS)),
}
