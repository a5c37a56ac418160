"""The classes of Gemma, whose layers all have attention; Gemma 4 comes with experts or without. Data, and light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed

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

GEMMA: tuple[DecoderClass, ...] = (
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
        "Gemma3nForCausalLM",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "rope_theta": 1_000_000.0,
            "final_logit_softcapping": 30.0,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 15,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "laurel_rank": 64,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD,
        period=5,
    ),
    DecoderClass(
        "Gemma4ForCausalLM",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": False,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        },
        windowed=Windowed.ALWAYS,
        local=Local.PERIOD_AND_LAST,
        period=6,
        by_layer=True,
    ),
)
