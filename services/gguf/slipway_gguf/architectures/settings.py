"""Values that graphs assume for settings, and defaults of classes, which several entries of the table share. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.classes import LLAMA
from slipway_gguf.architectures.entry import CONFIG_VALUES, Numbers

Assumed = Mapping[str, tuple[Any, ...]]

SILU: Assumed = {"hidden_act": ("silu", "swish")}
SILU_WITHOUT_BIAS: Assumed = {**SILU, "attention_bias": (False,)}
GELU: Assumed = {"hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")}
"""llama.cpp has one function for all of these."""
TIED: Assumed = {"tie_word_embeddings": (True,)}
"""The graph has no head of its own."""
UNTIED: Assumed = {"tie_word_embeddings": (False,)}
"""The graph has no head without a tensor of its own."""
EXPERTS = ("num_local_experts", "num_experts")
ROUTED_EXPERTS = ("n_routed_experts",)
EVERY_LAYER: Assumed = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
"""All layers have experts."""
GRANITE_DEFAULTS: Mapping[str, Any] = {
    **LLAMA,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
GRANITE_EXPERT_DEFAULTS: Mapping[str, Any] = {**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}
SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the function of a router's scores (``llama_expert_gating_func_type``)."""


def has_exact_gelu(settings: Mapping[str, Any]) -> bool:
    """Return whether a decoder has the exact GELU, which llama.cpp approximates by tanh."""
    return any(settings.get(key) == "gelu" for key in ("hidden_act", "activation", "activation_function"))


def sections(numbers: Numbers) -> tuple[int, ...]:
    """Return how many frequencies of the rotary embedding each axis of positions has; llama.cpp has four axes.

    In text all axes are equal, so any shares compute the same; llama.cpp stops if they are more than there are frequencies.
    """
    pairs, listed = numbers.decoder.rotary.rotated // 2, numbers.decoder.rotary.parameters.get("mrope_section")
    if listed is None:
        return (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0)
    whole = isinstance(listed, list) and all(isinstance(each, int) and each >= 0 for each in listed)
    if not whole or len(listed) != 3 or sum(listed) != pairs:
        raise CONFIG_VALUES.invalid("mrope_section", listed, f"three whole numbers that are {pairs} together")
    return (*listed, 0)
