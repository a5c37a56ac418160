"""Architectures with recurrent layers by the gated delta rule (Qwen3-Next, Qwen3.5). Data, and light.

Sources: llama.cpp's ``conversion/qwen.py``, ``src/models/qwen35.cpp``, ``qwen35moe.cpp`` and ``qwen3next.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass
from slipway_gguf.architectures.entry import (
    Architecture,
    Change,
    Heads,
    Key,
    Numbers,
    Piece,
    Pieces,
    Target,
    View,
    keep,
)
from slipway_gguf.architectures.refusals import interval_of, other_linear_attention
from slipway_gguf.architectures.settings import EVERY_LAYER, EXPERTS, SILU_WITHOUT_BIAS, sections
from slipway_gguf.architectures.views import in_groups, rows, tiled_columns, tiled_rows, without_middle


def _heads(numbers: Numbers) -> tuple[int, int, int]:
    """Return the heads of keys in a recurrent layer, the heads of values for each of them, and their width."""
    groups = numbers.whole("linear_num_key_heads")
    return groups, numbers.whole("linear_num_value_heads") // groups, numbers.whole("linear_value_head_dim")


def _values_tiled(numbers: Numbers) -> tuple[Piece, ...]:
    groups, each, width = _heads(numbers)
    return (Piece(rows=tiled_rows(groups, each, width)),)


def _heads_tiled(numbers: Numbers) -> tuple[Piece, ...]:
    groups, each, _ = _heads(numbers)
    return (Piece(rows=tiled_rows(groups, each, 1)),)


def _outputs_tiled(numbers: Numbers) -> tuple[Piece, ...]:
    groups, each, width = _heads(numbers)
    return (Piece(columns=tiled_columns(groups, each, width)),)


def _last_tiled(form: View, numbers: Numbers) -> tuple[Piece, ...]:
    """Return queries and keys as they are, and the values behind them in ggml's order."""
    groups, each, width = _heads(numbers)
    before = 2 * groups * numbers.whole("linear_key_head_dim")
    return (
        Piece(form=form, take=rows(0, before)),
        Piece(form=form, take=rows(before), rows=tiled_rows(groups, each, width)),
    )


def _joined(*which: int) -> Pieces:
    """Return parts of each group of ``in_proj_qkvz``, whose groups have queries, keys, values and gates behind each other."""

    def pieces(numbers: Numbers) -> tuple[Piece, ...]:
        groups, each, width = _heads(numbers)
        sizes = [numbers.whole("linear_key_head_dim")] * 2 + [each * width] * 2
        ends = [sum(sizes[: index + 1]) for index in range(4)]
        return tuple(Piece(rows=in_groups(groups, ends[i] - sizes[i], ends[i])) for i in which)

    return pieces


_NORMS = {"linear_attn.norm.weight": (Target("ssm_norm.weight"),)}
"""The norm of a recurrent layer adds nothing to its weight, unlike the others of these models."""
_DELTA_NET: Mapping[str, tuple[Target, ...]] = {
    **_NORMS,
    "linear_attn.A_log": (Target("ssm_a", _heads_tiled, change=Change.NEGATED_EXPONENTIAL),),
    "linear_attn.dt_bias": (Target("ssm_dt.bias", _heads_tiled),),
    "linear_attn.conv1d.weight": (Target("ssm_conv1d.weight", partial(_last_tiled, without_middle)),),
    "linear_attn.in_proj_qkv.weight": (Target("attn_qkv.weight", partial(_last_tiled, keep)),),
    "linear_attn.in_proj_z.weight": (Target("attn_gate.weight", _values_tiled),),
    "linear_attn.in_proj_a.weight": (Target("ssm_alpha.weight", _heads_tiled),),
    "linear_attn.in_proj_b.weight": (Target("ssm_beta.weight", _heads_tiled),),
    "linear_attn.out_proj.weight": (Target("ssm_out.weight", _outputs_tiled),),
}
_DELTA_NET_KEYS: Mapping[str, Key] = {
    "ssm.conv_kernel": lambda numbers: numbers.whole("linear_conv_kernel_dim"),
    "ssm.state_size": lambda numbers: numbers.whole("linear_key_head_dim"),
    "ssm.group_count": lambda numbers: numbers.whole("linear_num_key_heads"),
    "ssm.time_step_rank": lambda numbers: numbers.whole("linear_num_value_heads"),
    "ssm.inner_size": lambda numbers: numbers.whole("linear_value_head_dim") * numbers.whole("linear_num_value_heads"),
    "full_attention_interval": lambda numbers: interval_of(numbers.kinds),
}


_QWEN35_KEYS: Mapping[str, Key] = {**_DELTA_NET_KEYS, "rope.dimension_sections": sections}
_NEXT_TOKENS: Mapping[str, tuple[Target, ...]] = {
    "eh_proj.weight": (Target("nextn.eh_proj.weight"),),
    "enorm.weight": (Target("nextn.enorm.weight", offset=1.0),),
    "hnorm.weight": (Target("nextn.hnorm.weight", offset=1.0),),
    "shared_head.norm.weight": (Target("nextn.shared_head_norm.weight", offset=1.0),),
}
_QWEN35_HEADS = Heads(
    ("mtp.",),
    {
        "mtp.layers.{index}.": "model.layers.{layer}.",
        "mtp.fc.": "model.layers.{layer}.eh_proj.",
        "mtp.pre_fc_norm_embedding.": "model.layers.{layer}.enorm.",
        "mtp.pre_fc_norm_hidden.": "model.layers.{layer}.hnorm.",
        "mtp.norm.": "model.layers.{layer}.shared_head.norm.",
    },
)
_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "num_attention_heads": 16,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERT_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

DELTA_NET: tuple[Architecture, ...] = (
    Architecture(
        "qwen35",
        DecoderClass(
            "Qwen3_5ForCausalLM",
            {**_DEFAULTS, "num_key_value_heads": 4},
            norm_offset=1.0,
            by_layer=True,
        ),
        assumes={**SILU_WITHOUT_BIAS, "attn_output_gate": (True,)},
        rope=("mrope", "yarn"),
        partial=True,
        tensors={**_DELTA_NET, **_NEXT_TOKENS},
        keys=_QWEN35_KEYS,
        refuses=other_linear_attention,
        heads=_QWEN35_HEADS,
        notes="recurrent layers: heads of values in ggml's order, decay as −exp",
        wholes={"Qwen3_5ForConditionalGeneration": "qwen3_5_text"},
    ),
    Architecture(
        "qwen35moe",
        DecoderClass(
            "Qwen3_5MoeForCausalLM",
            {**_EXPERT_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
            norm_offset=1.0,
            by_layer=True,
        ),
        assumes={**SILU_WITHOUT_BIAS, "attn_output_gate": (True,)},
        rope=("mrope", "yarn"),
        partial=True,
        experts=EXPERTS,
        tensors={**_DELTA_NET, **_NEXT_TOKENS},
        keys=_QWEN35_KEYS,
        refuses=other_linear_attention,
        heads=_QWEN35_HEADS,
        notes="recurrent layers: heads of values in ggml's order, decay as −exp",
        wholes={"Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text"},
    ),
    Architecture(
        "qwen3next",
        DecoderClass(
            "Qwen3NextForCausalLM",
            {**_EXPERT_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
            norm_offset=1.0,
            by_layer=True,
        ),
        assumes={**SILU_WITHOUT_BIAS, **EVERY_LAYER, "norm_topk_prob": (True,)},
        rope=("mrope", "yarn"),
        partial=True,
        experts=EXPERTS,
        tensors={
            **_NORMS,
            "linear_attn.A_log": (Target("ssm_a", change=Change.NEGATED_EXPONENTIAL),),
            "linear_attn.dt_bias": (Target("ssm_dt.bias"),),
            "linear_attn.conv1d.weight": (Target("ssm_conv1d.weight", lambda _: (Piece(form=without_middle),)),),
            "linear_attn.in_proj_qkvz.weight": (
                Target("attn_qkv.weight", _joined(0, 1, 2)),
                Target("attn_gate.weight", _joined(3)),
            ),
        },
        keys=_DELTA_NET_KEYS,
        refuses=other_linear_attention,
        heads=Heads(("mtp.",)),
        notes="recurrent layers: one projection becomes two, decay as −exp",
    ),
)
