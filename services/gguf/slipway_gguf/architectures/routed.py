"""Architectures with attention in all layers and experts, whose router adds a bias to the scores by which it chooses. Data, and light.

Only the choice sees the bias (``e_score_correction_bias``), as in DeepSeek-V3, which is in ``latent``.
Sources: llama.cpp's ``conversion/`` (a file for each family) and ``src/models/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway_gguf.architectures.entry import (
    Architecture,
    Heads,
    Key,
    Numbers,
    Piece,
    Target,
    local_layers,
)
from slipway_gguf.architectures.mixtures import MIXTRAL_TENSORS
from slipway_gguf.architectures.refusals import (
    describe_assumption,
    first_of,
    grouped_heads,
    other_period,
    unlisted_windows,
)
from slipway_gguf.architectures.settings import (
    EXPERTS,
    ROUTED_EXPERTS,
    SIGMOID,
    SILU,
    SILU_WITHOUT_BIAS,
)

ROUTED_KEYS: Mapping[str, Key] = {
    "leading_dense_block_count": lambda numbers: numbers.count("first_k_dense_replace"),
    "expert_shared_count": lambda numbers: numbers.count("n_shared_experts"),
    "expert_gating_func": lambda _: SIGMOID,
    "expert_weights_scale": lambda numbers: numbers.number("routed_scaling_factor"),
    "expert_weights_norm": lambda numbers: numbers.flag("norm_topk_prob"),
}
ROUTED: Mapping[str, tuple[Target, ...]] = {"mlp.gate.e_score_correction_bias": (Target("exp_probs_b.bias"),)}
NEXT_LAYER = ("model.layers.{layer}.",)
_BIASED: Mapping[str, tuple[Target, ...]] = {
    **MIXTRAL_TENSORS,
    "block_sparse_moe.e_score_correction_bias": (Target("exp_probs_b.bias"),),
}


def _flat(_: Numbers) -> tuple[Piece, ...]:
    """Return a matrix of one row as a vector."""
    return (Piece(form=lambda whole: whole.reshape(-1)),)


def other_last_layer(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse layers without experts behind those that have some (ERNIE 4.5)."""
    end, layers = settings.get("moe_layer_end_index"), settings.get("num_hidden_layers")
    if end in (None, -1) or (isinstance(layers, int) and end == layers - 1):
        return ""
    return describe_assumption(architecture, "moe_layer_end_index", end, "experts up to the last layer")


def _unscaled(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse embeddings that are not scaled, which null means too (AFMoE)."""
    scaled = settings.get("mup_enabled")
    return "" if scaled else describe_assumption(architecture, "mup_enabled", scaled, "true")


def other_dense_layers(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a list of layers without experts that are others than the first ones."""
    kinds, first = settings.get("mlp_layer_types"), settings.get("first_k_dense_replace")
    if kinds is None or not isinstance(first, int):
        return ""
    layers = range(len(kinds)) if isinstance(kinds, list) else ()
    if kinds == ["dense" if layer < first else "sparse" for layer in layers]:
        return ""
    return describe_assumption(architecture, "mlp_layer_types", kinds, f"experts in all layers but the first {first}")


def _shared_width(numbers: Numbers, shared: str) -> int | None:
    return numbers.whole("moe_intermediate_size") * numbers.count(shared) or None


ROUTED_MIXTURES: tuple[Architecture, ...] = (
    Architecture(
        "glm4moe",
        DecoderClass(
            "Glm4MoeForCausalLM",
            {
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 0.5,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1408,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
                "use_qk_norm": False,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        assumes={**SILU, "n_group": (1,), "topk_group": (1,)},
        partial=True,
        experts=ROUTED_EXPERTS,
        dense="first_k_dense_replace",
        tensors=ROUTED,
        keys=ROUTED_KEYS,
        heads=Heads(NEXT_LAYER, {each: each for each in NEXT_LAYER}),
    ),
    Architecture(
        "dots1",
        DecoderClass(
            "Dots1ForCausalLM",
            {
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "moe_intermediate_size": 1408,
                "sliding_window": 4096,
                "max_window_layers": 62,
            },
            windowed=Windowed.ALWAYS,
            local=Local.LAST,
        ),
        assumes={**SILU_WITHOUT_BIAS, "n_group": (1,), "topk_group": (1,)},
        experts=ROUTED_EXPERTS,
        dense="first_k_dense_replace",
        tensors=ROUTED,
        keys=ROUTED_KEYS,
        refuses=grouped_heads,
    ),
    Architecture(
        "minimax-m2",
        DecoderClass(
            "MiniMaxM2ForCausalLM",
            {
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 196608,
                "rms_norm_eps": 1e-6,
                "num_experts_per_tok": 8,
                "num_local_experts": 256,
                "rope_theta": 5_000_000.0,
            },
            turned="rotary_dim",
        ),
        assumes=SILU,
        partial=True,
        experts=EXPERTS,
        tensors=_BIASED,
        keys={
            "expert_feed_forward_length": lambda numbers: numbers.whole("intermediate_size"),
            "expert_gating_func": lambda _: SIGMOID,
        },
    ),
    Architecture(
        "ernie4_5-moe",
        DecoderClass(
            "Ernie4_5_MoeForCausalLM",
            {
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "moe_intermediate_size": 1536,
                "moe_k": 6,
                "moe_num_experts": 64,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
                "moe_layer_interval": 1,
                "rope_theta": 500_000.0,
            },
        ),
        assumes={**SILU, "use_bias": (False,), "moe_layer_interval": (1,)},
        experts=("moe_num_experts",),
        dense="moe_layer_start_index",
        tensors={"mlp.moe_statics.e_score_correction_bias": (Target("exp_probs_b.bias", _flat),)},
        keys={
            "leading_dense_block_count": lambda numbers: numbers.count("moe_layer_start_index"),
            "interleave_moe_layer_step": lambda numbers: numbers.whole("moe_layer_interval"),
            "expert_used_count": lambda numbers: numbers.whole("moe_k"),
            "expert_shared_count": lambda numbers: numbers.count("moe_num_shared_experts"),
            "expert_shared_feed_forward_length": lambda numbers: _shared_width(numbers, "moe_num_shared_experts"),
        },
        refuses=other_last_layer,
    ),
    Architecture(
        "exaone-moe",
        DecoderClass(
            "ExaoneMoeForCausalLM",
            {
                "num_key_value_heads": 32,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "num_shared_experts": 1,
                "moe_intermediate_size": 1024,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
            },
            windowed=Windowed.ALWAYS,
            local=Local.PERIOD,
            period=4,
        ),
        assumes={**SILU, "n_group": (1,), "topk_group": (1,)},
        has_windows=True,
        experts=EXPERTS,
        dense="first_k_dense_replace",
        tensors={**ROUTED, "mlp.e_score_correction_bias": (Target("exp_probs_b.bias"),)},  # as published, and as loaded
        keys={
            **ROUTED_KEYS,
            "expert_shared_count": lambda numbers: numbers.count("num_shared_experts"),
            "expert_shared_feed_forward_length": lambda numbers: _shared_width(numbers, "num_shared_experts"),
            "attention.sliding_window_pattern": local_layers,
        },
        refuses=first_of(unlisted_windows, other_dense_layers),
        heads=Heads(("mtp.",)),
        notes="layers with a window are rotated, and others are not",
    ),
    Architecture(
        "afmoe",
        DecoderClass(
            "AfmoeForCausalLM",
            {
                "head_dim": 128,
                "max_position_embeddings": 16384,
                "rms_norm_eps": 1e-5,
                "sliding_window": 1024,
                "num_experts": 64,
                "num_experts_per_tok": 6,
                "num_shared_experts": 2,
                "num_dense_layers": 1,
                "moe_intermediate_size": 1408,
                "route_scale": 1.0,
                "mup_enabled": False,
            },
            windowed=Windowed.ALWAYS,
            local=Local.PERIOD,
            period=4,
        ),
        assumes={**SILU_WITHOUT_BIAS, "global_attn_every_n_layers": (4,)},
        has_windows=True,
        experts=EXPERTS,
        dense="num_dense_layers",
        tensors={"mlp.expert_bias": (Target("exp_probs_b.bias"),)},
        keys={
            "leading_dense_block_count": lambda numbers: numbers.count("num_dense_layers"),
            "expert_shared_count": lambda numbers: numbers.count("num_shared_experts"),
            "expert_gating_func": lambda _: SIGMOID,
            "expert_weights_scale": lambda numbers: numbers.number("route_scale"),
            "expert_weights_norm": lambda _: True,  # the class has no other, whatever settings say
        },
        refuses=first_of(_unscaled, other_period),
        notes="gates of attention; layers with a window are rotated, and others are not",
    ),
    Architecture(
        "glm4moe",
        DecoderClass(
            "SolarOpenForCausalLM",
            {
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1280,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
            },
        ),
        assumes={**SILU, "n_group": (1,), "topk_group": (1,), "first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        experts=ROUTED_EXPERTS,
        tensors=ROUTED,
        keys=ROUTED_KEYS,
    ),
)
