"""Classes of decoders in transformers, and what their code adds to a ``config.json``. Data, and light.

A new class is one entry here. Formats that write a model in a form of their own say in their tables which of these they write, and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Windowed(Enum):
    """When layers of a class look back no further than ``sliding_window``."""

    NEVER = "never, whatever a configuration says"
    ASKED = "if use_sliding_window is true"
    ALWAYS = "if sliding_window is set"


class Local(Enum):
    """Which layers have the window, if a model has one and no ``layer_types`` says it."""

    ALL = "all, whatever layer_types says"
    PERIOD = "all but every layer of a period"
    LAST = "those from max_window_layers on"
    FIRST_ODD = "the first, third and so on, below max_window_layers"
    UNROTATED = "those without a rotary embedding"


@dataclass(frozen=True, slots=True)
class DecoderClass:
    """A class of transformers.

    Attributes:
        name: Its name.
        defaults: Values that it has for settings that ``config.json`` may leave out.
        windowed: When its layers have a sliding window.
        local: Which of them have it.
        period: Period of the layers with full attention, where that is the rule; otherwise 0.
        norm_offset: Number that it adds to the weights of its norms.
        transposed: Whether its matrices are stored as (in, out).
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windowed: Windowed = Windowed.NEVER
    local: Local = Local.ALL
    period: int = 0
    norm_offset: float = 0.0
    transposed: bool = False


_LLAMA: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_QWEN_DENSE: Mapping[str, Any] = {**_QWEN, "max_window_layers": 28}
_GEMMA: Mapping[str, Any] = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "head_dim": 256,
}
_GEMMA_2: Mapping[str, Any] = {
    **_GEMMA,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}

_CLASSES = (
    DecoderClass("LlamaForCausalLM", _LLAMA),
    DecoderClass(
        "MistralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
        windowed=Windowed.ALWAYS,
    ),
    DecoderClass("Qwen2ForCausalLM", _QWEN_DENSE, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass(
        "Qwen2MoeForCausalLM",
        {**_QWEN_DENSE, "num_experts": 60, "num_experts_per_tok": 4},
        windowed=Windowed.ASKED,
        local=Local.FIRST_ODD,
    ),
    DecoderClass("Qwen3ForCausalLM", {**_QWEN_DENSE, "head_dim": 128}, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass(
        "Qwen3MoeForCausalLM",
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        windowed=Windowed.ASKED,
    ),
    DecoderClass("GemmaForCausalLM", {**_GEMMA, "num_key_value_heads": 16}, norm_offset=1.0),
    DecoderClass(
        "Gemma2ForCausalLM",
        {**_GEMMA_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=2,
        norm_offset=1.0,
    ),
    DecoderClass(
        "Gemma3ForCausalLM",
        {
            **_GEMMA_2,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=6,
        norm_offset=1.0,
    ),
    DecoderClass(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windowed=Windowed.ALWAYS,
    ),
    DecoderClass(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        windowed=Windowed.ASKED,
        local=Local.UNROTATED,
    ),
    DecoderClass(
        "GraniteForCausalLM",
        {
            **_LLAMA,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    ),
    DecoderClass(
        "GPT2LMHeadModel",
        {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        transposed=True,
    ),
)
CLASSES: Mapping[str, DecoderClass] = {each.name: each for each in _CLASSES}
"""By name."""
