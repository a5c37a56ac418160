"""Apertus."""

from __future__ import annotations

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import LLAMA3

FAMILIES = {
    "apertus": Family(
        of("ApertusConfig", "ApertusForCausalLM", head_dim=32, rope_parameters=LLAMA3),
        refused=(({"hidden_act": "silu"}, "hidden_act"),),
        fast=True,
    ),
}
