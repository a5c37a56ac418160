"""Architectures with short convolutions beside attention (LFM2). Data, and light.

Sources: llama.cpp's ``conversion/lfm2.py`` and ``src/models/lfm2.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass
from slipway_gguf.architectures.entry import Architecture, Key, Numbers, Piece, Target, kv_heads_by_layer
from slipway_gguf.architectures.settings import EXPERTS, SIGMOID
from slipway_gguf.architectures.views import without_middle


def _inner(numbers: Numbers) -> int:
    """Return the width of the feed-forward network, which the class derives from the setting."""
    size = numbers.whole("block_ff_dim", "intermediate_size")
    if not numbers.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if numbers.decoder.settings.get("block_ffn_dim_multiplier") is None:
        return size
    multiple = numbers.whole("block_multiple_of")
    return multiple * -(-int(numbers.number("block_ffn_dim_multiplier") * size) // multiple)


_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "conv_L_cache": 3,
    "conv_bias": False,
}
_CONVOLUTION: Mapping[str, tuple[Target, ...]] = {
    "conv.conv.weight": (Target("shortconv.conv.weight", lambda _: (Piece(form=without_middle),)),),
    "model.embedding_norm.weight": (Target("token_embd_norm.weight"),),
}
_LFM2_KEYS: Mapping[str, Key] = {
    "attention.head_count_kv": kv_heads_by_layer,
    "attention.layer_norm_rms_epsilon": lambda numbers: numbers.number("norm_eps"),
    "shortconv.l_cache": lambda numbers: numbers.whole("conv_L_cache"),
}
_LFM2_NEEDS = ("token_embd.weight", "token_embd_norm.weight")

CONVOLUTION: tuple[Architecture, ...] = (
    Architecture(
        "lfm2",
        DecoderClass(
            "Lfm2ForCausalLM",
            {**_DEFAULTS, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
            by_layer=True,
        ),
        assumes={"conv_bias": (False,)},
        rope=("default",),
        tensors=_CONVOLUTION,
        keys={**_LFM2_KEYS, "feed_forward_length": _inner},
        needs=_LFM2_NEEDS,
        notes="convolutional layers; heads of keys by layer",
        wholes={"Lfm2VlForConditionalGeneration": "lfm2"},
    ),
    Architecture(
        "lfm2moe",
        DecoderClass(
            "Lfm2MoeForCausalLM",
            {
                **_DEFAULTS,
                "num_dense_layers": 2,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1792,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
                "use_expert_bias": True,
            },
            by_layer=True,
        ),
        assumes={"conv_bias": (False,), "norm_topk_prob": (True,)},
        experts=EXPERTS,
        dense="num_dense_layers",
        tensors={
            **_CONVOLUTION,
            "feed_forward.expert_bias": (Target("exp_probs_b.bias"),),
            "feed_forward.experts.w1.weight": (Target("ffn_gate_exps.weight"),),
            "feed_forward.experts.w2.weight": (Target("ffn_down_exps.weight"),),
            "feed_forward.experts.w3.weight": (Target("ffn_up_exps.weight"),),
        },
        keys={
            **_LFM2_KEYS,
            "expert_gating_func": lambda _: SIGMOID,
            "leading_dense_block_count": lambda numbers: numbers.count("num_dense_layers"),
        },
        needs=_LFM2_NEEDS,
        notes="convolutional layers; heads of keys by layer",
    ),
)
