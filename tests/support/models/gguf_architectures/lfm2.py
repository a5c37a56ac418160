"""LFM2."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import EXPERTS

_CONVOLUTION: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}

FAMILIES = {
    "lfm2": Family(
        of("Lfm2Config", "Lfm2ForCausalLM", **_CONVOLUTION, block_multiple_of=32),
        refused=(({"conv_bias": True}, "conv_bias"),),
        fast=True,
    ),
    "lfm2moe": Family(
        of("Lfm2MoeConfig", "Lfm2MoeForCausalLM", **_CONVOLUTION, **EXPERTS, num_dense_layers=1, use_expert_bias=True)
    ),
}
