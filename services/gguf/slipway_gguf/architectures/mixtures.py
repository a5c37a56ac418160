"""Architectures with attention in all layers and experts, whose router chooses by its scores alone. Data, and light.

Sources: llama.cpp's ``conversion/`` (a file for each family) and ``src/models/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.classes import QWEN, QWEN_2
from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway_gguf.architectures.entry import (
    CONFIG_VALUES,
    Architecture,
    Numbers,
    Piece,
    Pieces,
    Target,
)
from slipway_gguf.architectures.refusals import describe_assumption, grouped_heads, other_chunks, other_period
from slipway_gguf.architectures.settings import (
    EVERY_LAYER,
    EXPERTS,
    GRANITE_EXPERT_DEFAULTS,
    SILU,
    SILU_WITHOUT_BIAS,
)
from slipway_gguf.architectures.views import every_second, half, transposed_experts


def _transposed(_: Numbers) -> tuple[Piece, ...]:
    return (Piece(form=transposed_experts),)


def _alternate(first: int, *, transposed: bool) -> Pieces:
    """Return every second row of each expert: gates have even numbers and the others odd ones."""
    columns = every_second(first)
    if not transposed:
        return lambda _: (Piece(form=columns),)
    return lambda _: (Piece(form=lambda whole: transposed_experts(columns(whole))),)


_GPT_OSS: Mapping[str, tuple[Target, ...]] = {
    "mlp.experts.gate_up_proj": (
        Target("ffn_gate_exps.weight", _alternate(0, transposed=True)),
        Target("ffn_up_exps.weight", _alternate(1, transposed=True)),
    ),
    "mlp.experts.gate_up_proj_bias": (
        Target("ffn_gate_exps.bias", _alternate(0, transposed=False)),
        Target("ffn_up_exps.bias", _alternate(1, transposed=False)),
    ),
    "mlp.experts.down_proj": (Target("ffn_down_exps.weight", _transposed),),
    "mlp.experts.down_proj_bias": (Target("ffn_down_exps.bias"),),
    "self_attn.sinks": (Target("attn_sinks.weight"),),
}
MIXTRAL_TENSORS: Mapping[str, tuple[Target, ...]] = {
    "block_sparse_moe.experts.w1.weight": (Target("ffn_gate_exps.weight"),),
    "block_sparse_moe.experts.w2.weight": (Target("ffn_down_exps.weight"),),
    "block_sparse_moe.experts.w3.weight": (Target("ffn_up_exps.weight"),),
}


def halves(gate: str, up: str) -> tuple[Target, ...]:
    """Return the two projections that a class stores as one, gate first."""
    return (
        Target(gate, lambda _: (Piece(take=half(0)),)),
        Target(up, lambda _: (Piece(take=half(1)),)),
    )


GRANITE_EXPERTS: Mapping[str, tuple[Target, ...]] = {
    "block_sparse_moe.input_linear.weight": halves("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "shared_mlp.input_linear.weight": halves("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
}


def _same_of_all(numbers: Numbers, key: str) -> int:
    """Return a number that a setting gives once, or for each layer."""
    given = numbers.decoder.settings.get(key)
    first = given[0] if isinstance(given, list) and given else given
    return CONFIG_VALUES.whole({key: first}, key)


def other_by_layer(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another number of chosen or shared experts in some layers (HunYuan)."""
    for key in ("moe_topk", "num_shared_expert"):
        given = settings.get(key)
        if isinstance(given, list) and any(each != given[0] for each in given):
            return describe_assumption(architecture, key, given, "the same number in all layers")
    return ""


def _transposed_half(which: int) -> Pieces:
    """Return gates (0) or the others (1) of experts that are stored as one matrix, (in, out)."""
    return lambda _: (Piece(form=transposed_experts, take=half(which)),)


_LLAMA_4: Mapping[str, tuple[Target, ...]] = {
    "feed_forward.experts.gate_up_proj": (
        Target("ffn_gate_exps.weight", _transposed_half(0)),
        Target("ffn_up_exps.weight", _transposed_half(1)),
    ),
    "feed_forward.experts.down_proj": (Target("ffn_down_exps.weight", _transposed),),
}


def _in_steps(numbers: Numbers, layer: int) -> bool:
    """Return whether a layer has experts: the last one of each step (Llama 4)."""
    return (layer + 1) % numbers.whole("interleave_moe_layer_step") == 0


MIXTURES: tuple[Architecture, ...] = (
    Architecture(
        "qwen2moe",
        DecoderClass(
            "Qwen2MoeForCausalLM",
            {**QWEN_2, "num_experts": 60, "num_experts_per_tok": 4},
            windowed=Windowed.ASKED,
            local=Local.FIRST_ODD,
        ),
        assumes={
            **SILU,
            **EVERY_LAYER,
            "norm_topk_prob": (False,),
            "tie_word_embeddings": (False,),
            "qkv_bias": (True,),
        },
        experts=EXPERTS,
    ),
    Architecture(
        "qwen3moe",
        DecoderClass(
            "Qwen3MoeForCausalLM",
            {
                **QWEN,
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
            windowed=Windowed.ASKED,
        ),
        assumes={**SILU_WITHOUT_BIAS, **EVERY_LAYER, "norm_topk_prob": (True,)},
        experts=EXPERTS,
    ),
    Architecture(
        "llama",
        DecoderClass(
            "MixtralForCausalLM",
            {
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            windowed=Windowed.ALWAYS,
        ),
        assumes=SILU,
        paired=True,
        experts=EXPERTS,
        tensors=MIXTRAL_TENSORS,
    ),
    Architecture(
        "llama4",
        DecoderClass(
            "Llama4ForCausalLM",
            {
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "no_rope_layer_interval": 4,
                "use_qk_norm": True,
                "attention_chunk_size": 8192,
                "attn_temperature_tuning": True,
                "floor_scale": 8192,
                "attn_scale": 0.1,
            },
            by_layer=True,
        ),
        assumes={
            **SILU_WITHOUT_BIAS,
            "attention_chunk_size": (8192,),
            "attn_temperature_tuning": (True, 4),  # 4 was the default of transformers 4.51, which asks whether it is 0
            "floor_scale": (8192,),
            "attn_scale": (0.1,),
        },
        rope=("llama3",),
        experts=EXPERTS,
        sparse=_in_steps,
        tensors=_LLAMA_4,
        keys={
            "feed_forward_length": lambda numbers: numbers.whole("intermediate_size_mlp"),
            "expert_feed_forward_length": lambda numbers: numbers.whole("intermediate_size"),
            "interleave_moe_layer_step": lambda numbers: numbers.whole("interleave_moe_layer_step"),
        },
        refuses=other_chunks,
        notes="chunks of 8192 tokens, and attention that grows behind them; three of four layers are rotated; experts transposed, gates and others taken apart",
        wholes={"Llama4ForConditionalGeneration": "llama4_text"},
    ),
    Architecture(
        "granitemoe",
        DecoderClass("GraniteMoeForCausalLM", GRANITE_EXPERT_DEFAULTS),
        assumes=SILU,
        paired=True,
        experts=EXPERTS,
        tensors=GRANITE_EXPERTS,
        notes="scales of embedding, attention, residual and logits",
    ),
    Architecture(
        "granitemoe",
        DecoderClass("GraniteMoeSharedForCausalLM", {**GRANITE_EXPERT_DEFAULTS, "shared_intermediate_size": 0}),
        assumes=SILU,
        paired=True,
        experts=EXPERTS,
        tensors=GRANITE_EXPERTS,
        keys={"expert_shared_feed_forward_length": lambda numbers: numbers.count("shared_intermediate_size") or None},
        notes="as Granite with experts, with a shared one or none",
    ),
    Architecture(
        "olmoe",
        DecoderClass(
            "OlmoeForCausalLM",
            {
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
        ),
        assumes={**SILU_WITHOUT_BIAS, "norm_topk_prob": (False,), "clip_qkv": ()},
        experts=EXPERTS,
        refuses=grouped_heads,
    ),
    Architecture(
        "gpt-oss",
        DecoderClass(
            "GptOssForCausalLM",
            {
                "num_key_value_heads": 8,
                "head_dim": 64,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150_000.0,
                "sliding_window": 128,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0,
            },
            windowed=Windowed.ALWAYS,
            local=Local.PERIOD,
            period=2,
        ),
        assumes={**SILU, "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        rope=("yarn",),
        rounds_yarn=True,
        has_windows=True,
        experts=EXPERTS,
        tensors=_GPT_OSS,
        keys={"expert_feed_forward_length": lambda numbers: numbers.whole("intermediate_size")},
        refuses=other_period,
        notes="experts transposed, gates and others taken apart; sinks of attention",
    ),
    Architecture(
        "hunyuan-moe",
        DecoderClass(
            "HunYuanMoEV1ForCausalLM",
            {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
        ),
        assumes=SILU_WITHOUT_BIAS,
        rope=("dynamic",),
        experts=("num_experts",),
        keys={
            "expert_used_count": lambda numbers: _same_of_all(numbers, "moe_topk"),
            "expert_feed_forward_length": lambda numbers: numbers.decoder.inner,
            "expert_shared_feed_forward_length": lambda numbers: numbers.decoder.inner,
        },
        refuses=other_by_layer,
        notes="as many experts in each layer; with a fixed `alpha`",
    ),
)
