"""Architectures with recurrent layers of Mamba-2, alone or beside attention (Granite 4, Falcon-H1). Data, and light.

Sources: llama.cpp's ``conversion/mamba.py``, ``granite.py`` and ``falcon_h1.py``, ``src/models/granite-hybrid.cpp`` and ``falcon-h1.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass
from slipway_gguf.architectures.entry import (
    Architecture,
    Change,
    Key,
    Numbers,
    Piece,
    Pieces,
    Target,
    kv_heads_by_layer,
)
from slipway_gguf.architectures.mixtures import GRANITE_EXPERTS, halves
from slipway_gguf.architectures.refusals import (
    first_of,
    gate_behind_norm,
    limited_steps,
    without_rotation,
)
from slipway_gguf.architectures.settings import (
    EXPERTS,
    GRANITE_EXPERT_DEFAULTS,
    SILU_WITHOUT_BIAS,
    Assumed,
)
from slipway_gguf.architectures.views import as_column, as_groups, rows, without_middle


def _column(_: Numbers) -> tuple[Piece, ...]:
    return (Piece(form=as_column),)


def _in_groups_of(setting: str) -> Pieces:
    return lambda numbers: (Piece(form=as_groups(numbers.whole(setting))),)


def mamba_2_layer(prefix: str, groups: str) -> Mapping[str, tuple[Target, ...]]:
    """Return what becomes of the tensors of a recurrent layer of Mamba-2.

    Args:
        prefix: Name of the layer's part, such as ``mamba``.
        groups: Setting with the number of groups of its norm.
    """
    return {
        f"{prefix}.A_log": (Target("ssm_a", _column, change=Change.NEGATED_EXPONENTIAL),),
        f"{prefix}.D": (Target("ssm_d", _column),),
        f"{prefix}.dt_bias": (Target("ssm_dt.bias"),),
        f"{prefix}.conv1d.weight": (Target("ssm_conv1d.weight", lambda _: (Piece(form=without_middle),)),),
        f"{prefix}.norm.weight": (Target("ssm_norm.weight", _in_groups_of(groups)),),
    }


def _mamba2_keys(inner: Callable[[Numbers], int]) -> Mapping[str, Key]:
    return {
        "ssm.conv_kernel": lambda numbers: numbers.whole("mamba_d_conv"),
        "ssm.state_size": lambda numbers: numbers.whole("mamba_d_state"),
        "ssm.group_count": lambda numbers: numbers.whole("mamba_n_groups"),
        "ssm.time_step_rank": lambda numbers: numbers.whole("mamba_n_heads"),
        "ssm.inner_size": inner,
    }


_GRANITE_DENSE: Mapping[str, tuple[Target, ...]] = {
    "shared_mlp.input_linear.weight": halves("ffn_gate.weight", "ffn_up.weight"),
    "shared_mlp.output_linear.weight": (Target("ffn_down.weight"),),
}


def _has_experts(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("num_local_experts"))


def _is_recurrent(settings: Mapping[str, Any]) -> bool:
    """Return whether a Granite 4 has recurrent layers; some have attention in all."""
    kinds = settings.get("layer_types") or settings.get("layers_block_type")
    return not isinstance(kinds, list) or any(kind in ("mamba", "linear_attention") for kind in kinds)


_GRANITE_ASSUMES: Assumed = {
    **SILU_WITHOUT_BIAS,
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    "position_embedding_type": ("rope", "nope"),
}


def _is_rotated(numbers: Numbers) -> bool:
    return bool(numbers.decoder.settings.get("position_embedding_type") == "rope")


_GRANITE_KEYS: Mapping[str, Key] = {"rope.scaling.finetuned": _is_rotated}
"""llama.cpp reads by this key whether there is a rotary embedding at all."""
_SHARED_KEYS: Mapping[str, Key] = {
    "expert_shared_feed_forward_length": lambda numbers: numbers.whole("shared_intermediate_size")
}
_DENSE_KEYS: Mapping[str, Key] = {"feed_forward_length": lambda numbers: numbers.whole("shared_intermediate_size")}
_HYBRID_KEYS: Mapping[str, Key] = {
    **_mamba2_keys(lambda numbers: numbers.whole("mamba_expand") * numbers.decoder.hidden),
    **_GRANITE_KEYS,
    "attention.head_count_kv": kv_heads_by_layer,
}


def _falcon_inputs(numbers: Numbers) -> tuple[Piece, ...]:
    """Return the rows of a recurrent layer's inputs, multiplied as the class multiplies what they give: gate, x, B, C and time steps."""
    inner = numbers.whole("mamba_d_ssm")
    states = numbers.whole("mamba_n_groups") * numbers.whole("mamba_d_state")
    sizes = (inner, inner, states, states, numbers.whole("mamba_n_heads"))
    whole = numbers.number("ssm_in_multiplier")
    factors = numbers.numbers("ssm_multipliers", 5) if numbers.decoder.settings.get("ssm_multipliers") else (1.0,) * 5
    starts = [sum(sizes[:index]) for index in range(5)]
    return tuple(
        Piece(take=rows(start, start + size), factor=whole * factor)
        for start, size, factor in zip(starts, sizes, factors, strict=True)
    )


def _times(*keys: str) -> Pieces:
    """Return the whole tensor, multiplied by these settings."""

    def pieces(numbers: Numbers) -> tuple[Piece, ...]:
        factor = 1.0
        for key in keys:
            factor *= numbers.number(key)
        return (Piece(factor=factor),)

    return pieces


def _mlp_times(index: int) -> Pieces:
    def pieces(numbers: Numbers) -> tuple[Piece, ...]:
        listed = numbers.decoder.settings.get("mlp_multipliers")
        return (Piece(factor=numbers.numbers("mlp_multipliers", 2)[index] if listed else 1.0),)

    return pieces


_FALCON_H1: Mapping[str, tuple[Target, ...]] = {
    **mamba_2_layer("mamba", "mamba_n_groups"),
    "mamba.in_proj.weight": (Target("ssm_in.weight", _falcon_inputs),),
    "mamba.out_proj.weight": (Target("ssm_out.weight", _times("ssm_out_multiplier")),),
    "self_attn.q_proj.weight": (Target("attn_q.weight", _times("attention_in_multiplier")),),
    "self_attn.k_proj.weight": (Target("attn_k.weight", _times("attention_in_multiplier", "key_multiplier")),),
    "self_attn.v_proj.weight": (Target("attn_v.weight", _times("attention_in_multiplier")),),
    "self_attn.o_proj.weight": (Target("attn_output.weight", _times("attention_out_multiplier")),),
    "feed_forward.gate_proj.weight": (Target("ffn_gate.weight", _mlp_times(0)),),
    "feed_forward.down_proj.weight": (Target("ffn_down.weight", _mlp_times(1)),),
    # llama.cpp's name of this norm has no end.
    "pre_ff_layernorm.weight": (Target("ffn_norm"),),
    "model.embed_tokens.weight": (Target("token_embd.weight", _times("embedding_multiplier")),),
    "lm_head.weight": (Target("output.weight", _times("lm_head_multiplier")),),
}
"""llama.cpp has no keys for the multipliers, so that weights are multiplied by them."""


_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_GRANITE_4 = DecoderClass(
    "GraniteMoeHybridForCausalLM",
    {**GRANITE_EXPERT_DEFAULTS, **_DEFAULTS, "shared_intermediate_size": 1024},
    by_layer=True,
)

UNLIMITED = 1 << 20
"""Most tokens of a text for classes without positions, as llama.cpp's files have it."""
PURE_ASSUMES: Assumed = {"hidden_act": ("silu", "swish"), "use_bias": (False,), "use_conv_bias": (True,)}
PURE_KEYS: Mapping[str, Key] = {
    "feed_forward_length": lambda _: 0,
    "attention.head_count": lambda _: 0,
    "attention.head_count_kv": lambda _: 0,
    "attention.key_length": lambda _: None,
    "attention.value_length": lambda _: None,
    # llama.cpp reads the epsilon of these norms, which have no mean, by this name.
    "attention.layer_norm_rms_epsilon": lambda numbers: numbers.number("layer_norm_epsilon"),
    "attention.layer_norm_epsilon": lambda _: None,
    "ssm.conv_kernel": lambda numbers: numbers.whole("conv_kernel"),
    "ssm.state_size": lambda numbers: numbers.whole("state_size"),
    "ssm.inner_size": lambda numbers: numbers.whole("expand") * numbers.decoder.hidden,
}
"""Keys of models without attention."""

MAMBA_2: tuple[Architecture, ...] = (
    Architecture(
        "granitehybrid",
        _GRANITE_4,
        when=lambda settings: _is_recurrent(settings) and _has_experts(settings),
        assumes=_GRANITE_ASSUMES,
        paired=True,
        experts=EXPERTS,
        tensors={**mamba_2_layer("mamba", "mamba_n_groups"), **GRANITE_EXPERTS},
        keys={**_HYBRID_KEYS, **_SHARED_KEYS},
        refuses=limited_steps,
        notes="recurrent layers of Mamba-2; scales as Granite; with rotary embedding or without",
    ),
    Architecture(
        "granitehybrid",
        _GRANITE_4,
        when=_is_recurrent,
        assumes=_GRANITE_ASSUMES,
        paired=True,
        tensors={**mamba_2_layer("mamba", "mamba_n_groups"), **_GRANITE_DENSE},
        keys={**_HYBRID_KEYS, **_DENSE_KEYS},
        refuses=limited_steps,
        notes="recurrent layers of Mamba-2; scales as Granite; with rotary embedding or without",
    ),
    Architecture(
        "granitemoe",
        _GRANITE_4,
        when=_has_experts,
        assumes=_GRANITE_ASSUMES,
        paired=True,
        experts=EXPERTS,
        tensors=GRANITE_EXPERTS,
        keys={**_GRANITE_KEYS, **_SHARED_KEYS},
        refuses=without_rotation,
        notes="no recurrent layers; scales as Granite; with rotary embedding",
    ),
    Architecture(
        "granite",
        _GRANITE_4,
        assumes=_GRANITE_ASSUMES,
        paired=True,
        tensors=_GRANITE_DENSE,
        keys={**_GRANITE_KEYS, **_DENSE_KEYS},
        notes="no recurrent layers; scales as Granite; with rotary embedding or without",
    ),
    Architecture(
        "falcon-h1",
        DecoderClass(
            "FalconH1ForCausalLM",
            {
                **_DEFAULTS,
                "num_key_value_heads": 8,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "mamba_d_ssm": 1024,
                "mamba_rms_norm": False,
                "mamba_norm_before_gate": True,
                "embedding_multiplier": 1.0,
                "lm_head_multiplier": 1.0,
                "key_multiplier": 1.0,
                "attention_in_multiplier": 1.0,
                "attention_out_multiplier": 1.0,
                "ssm_in_multiplier": 1.0,
                "ssm_out_multiplier": 1.0,
            },
            by_layer=True,
        ),
        assumes={
            **SILU_WITHOUT_BIAS,
            "mamba_conv_bias": (True,),
            "mamba_proj_bias": (False,),
            "mlp_bias": (False,),
            "projectors_bias": (False,),
        },
        tensors=_FALCON_H1,
        keys=_mamba2_keys(lambda numbers: numbers.whole("mamba_d_ssm")),
        refuses=first_of(limited_steps, gate_behind_norm),
        notes="attention and Mamba-2 in each layer; the multipliers are multiplied into weights",
    ),
    Architecture(
        "mamba2",
        DecoderClass(
            "Mamba2ForCausalLM",
            {
                "layer_norm_epsilon": 1e-5,
                "state_size": 128,
                "conv_kernel": 4,
                "expand": 2,
                "n_groups": 8,
                "num_heads": 128,
            },
            positions=UNLIMITED,
            attends=False,
            by_layer=True,
            width="state_size",
        ),
        assumes=PURE_ASSUMES,
        rope=(),
        tensors=mamba_2_layer("mixer", "n_groups"),
        keys={
            **PURE_KEYS,
            "ssm.group_count": lambda numbers: numbers.whole("n_groups"),
            "ssm.time_step_rank": lambda numbers: numbers.whole("num_heads"),
        },
        refuses=limited_steps,
        notes="no attention; decay as −exp",
    ),
)
