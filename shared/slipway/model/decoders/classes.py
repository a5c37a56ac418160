"""Classes of decoders that several formats write. Data, and light.

What is said of a class that one format alone writes stands in that format's own entry of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed

LLAMA: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""Llama, and classes after it."""
QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
QWEN_2: Mapping[str, Any] = {**QWEN, "max_window_layers": 28}
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
    DecoderClass("LlamaForCausalLM", LLAMA),
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
    DecoderClass("Qwen2ForCausalLM", QWEN_2, windowed=Windowed.ASKED, local=Local.LAST),
    DecoderClass("Qwen3ForCausalLM", {**QWEN_2, "head_dim": 128}, windowed=Windowed.ASKED, local=Local.LAST),
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
        "GPT2LMHeadModel",
        {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        transposed=True,
    ),
)

CLASSES: Mapping[str, DecoderClass] = {each.name: each for each in _CLASSES}
"""By name."""
