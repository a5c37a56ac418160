"""Architectures with latent keys and values in all layers, with experts or without. Data, and light.

Sources: llama.cpp's ``conversion/deepseek.py`` and ``minicpm.py``; ``src/models/deepseek2.cpp`` and ``minicpm3.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipway.model.decoders.decoder_class import DecoderClass
from slipway_gguf.architectures.entry import (
    Architecture,
    Heads,
    Key,
    Numbers,
    Piece,
    Pieces,
    Target,
    rope_number,
)
from slipway_gguf.architectures.refusals import (
    describe_assumption,
    first_of,
    limited_groups,
    other_latent_queries,
    other_minicpm,
    other_scale_of_yarn,
)
from slipway_gguf.architectures.routed import NEXT_LAYER, ROUTED, ROUTED_KEYS
from slipway_gguf.architectures.settings import (
    ROUTED_EXPERTS,
    SILU_WITHOUT_BIAS,
    SOFTMAX,
)
from slipway_gguf.architectures.views import of_heads, transposed_experts


def _absorbed(first: str, end: tuple[str, ...], *, turned: bool) -> Pieces:
    """Return the part of ``kv_b_proj`` that gives the keys, or the values, of each head from the latent vector."""

    def pieces(numbers: Numbers) -> tuple[Piece, ...]:
        start = numbers.whole(first) if first else 0
        view = of_heads(numbers.decoder.heads, start, sum(map(numbers.whole, end)))
        return (Piece(form=(lambda whole: transposed_experts(view(whole))) if turned else view),)

    return pieces


_LATENT: Mapping[str, tuple[Target, ...]] = {
    **ROUTED,
    "self_attn.kv_b_proj.weight": (
        # llama.cpp multiplies queries by the keys' part, so that its cache has the latent vectors alone.
        Target("attn_k_b.weight", _absorbed("", ("qk_nope_head_dim",), turned=True)),
        Target("attn_v_b.weight", _absorbed("qk_nope_head_dim", ("qk_nope_head_dim", "v_head_dim"), turned=False)),
    ),
}


def _log_multiplier(numbers: Numbers) -> float | None:
    """Return by how much attention grows with the logarithm of the context's factor; None without scaling."""
    scale = rope_number(numbers, "mscale_all_dim")
    return None if scale is None else 0.1 * scale


def _other_dense_layers(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a list of layers without experts that are others than the first one (GLM-4.7-Flash)."""
    kinds = settings.get("mlp_layer_types")
    if kinds is None or (isinstance(kinds, list) and kinds == ["dense"] + ["sparse"] * (len(kinds) - 1)):
        return ""
    return describe_assumption(architecture, "mlp_layer_types", kinds, "experts in all layers but the first")


_LATENT_KEYS: Mapping[str, Key] = {
    **ROUTED_KEYS,
    "attention.head_count_kv": lambda _: 1,
    "attention.q_lora_rank": lambda numbers: numbers.count(
        "q_lora_rank"
    ),  # with 0 llama.cpp reads queries that are not latent
    "attention.kv_lora_rank": lambda numbers: numbers.whole("kv_lora_rank"),
    "attention.key_length": lambda numbers: numbers.whole("kv_lora_rank") + numbers.whole("qk_rope_head_dim"),
    "attention.value_length": lambda numbers: numbers.whole("kv_lora_rank"),
    "attention.key_length_mla": lambda numbers: numbers.whole("qk_nope_head_dim") + numbers.whole("qk_rope_head_dim"),
    "attention.value_length_mla": lambda numbers: numbers.whole("v_head_dim"),
    "expert_group_count": lambda numbers: numbers.whole("n_group"),
    "expert_group_used_count": lambda numbers: numbers.whole("topk_group"),
    "rope.scaling.yarn_log_multiplier": _log_multiplier,
}
_LATENT_V2_KEYS: Mapping[str, Key] = {
    **_LATENT_KEYS,
    "expert_gating_func": lambda _: SOFTMAX,
    "expert_weights_norm": lambda _: False,  # the class reads no such setting
    "expert_group_count": lambda _: None,
    "expert_group_used_count": lambda _: None,
}
_UNADAPTED = (".attn_q.weight", ".attn_q_a.weight", ".attn_q_b.weight", ".attn_kv_a_mqa.weight")
"""Queries, and vectors that are latent, which the graph computes without an adapter's factors."""
_DEEPSEEK_V3 = Architecture(
    "deepseek2",
    DecoderClass(
        "DeepseekV3ForCausalLM",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
        width="qk_rope_head_dim",
    ),
    assumes={**SILU_WITHOUT_BIAS, "rope_interleave": (True,)},
    rope=("yarn",),
    experts=ROUTED_EXPERTS,
    dense="first_k_dense_replace",
    tensors=_LATENT,
    keys=_LATENT_KEYS,
    scales_yarn=True,
    unadapted=_UNADAPTED,
    refuses=first_of(other_scale_of_yarn, other_latent_queries),
    heads=Heads(NEXT_LAYER),
    notes="latent keys and values: one projection becomes two; queries latent or not; groups of experts; equal `mscale` and `mscale_all_dim`",
)
_YOUTU_KEYS: Mapping[str, Key] = {
    **{key: value for key, value in _DEEPSEEK_V3.keys.items() if not key.startswith("expert_")},
    "leading_dense_block_count": lambda numbers: numbers.decoder.layers,
    "expert_feed_forward_length": lambda numbers: numbers.decoder.inner,
    "expert_shared_count": lambda _: 0,
}
"""The graph of DeepSeek, with no layer that has experts; llama.cpp wants numbers for them all the same."""
_MINICPM_KEYS: Mapping[str, Key] = {
    "attention.q_lora_rank": lambda numbers: numbers.whole("q_lora_rank"),
    "attention.kv_lora_rank": lambda numbers: numbers.whole("kv_lora_rank"),
    "attention.key_length": lambda numbers: numbers.whole("qk_nope_head_dim") + numbers.whole("qk_rope_head_dim"),
    "attention.value_length": lambda numbers: numbers.whole(
        "v_head_dim", default=max(1, numbers.decoder.hidden // numbers.decoder.heads)
    ),
}

LATENT: tuple[Architecture, ...] = (
    _DEEPSEEK_V3,
    Architecture(
        "deepseek2",
        DecoderClass(
            "DeepseekV2ForCausalLM",
            {
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "intermediate_size": 11008,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "moe_intermediate_size": 1407,
                "first_k_dense_replace": 0,
                "routed_scaling_factor": 1.0,
                "topk_method": "greedy",
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
            },
            width="qk_rope_head_dim",
        ),
        assumes={**SILU_WITHOUT_BIAS, "mlp_bias": (False,)},
        rope=("yarn",),
        experts=ROUTED_EXPERTS,
        dense="first_k_dense_replace",
        tensors=_LATENT,
        keys=_LATENT_V2_KEYS,
        scales_yarn=True,
        unadapted=_UNADAPTED,
        refuses=first_of(other_scale_of_yarn, other_latent_queries, limited_groups),
        notes="the same as DeepSeek-V3 with a softmax of the experts' scores; as many groups as experts are taken, or no groups",
    ),
    Architecture(
        "minicpm3",
        DecoderClass(
            "MiniCPM3ForCausalLM",
            {
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "q_lora_rank": 768,
                "kv_lora_rank": 256,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 32,
                "scale_emb": 12,
                "scale_depth": 1.4,
                "dim_model_base": 256,
            },
            width="qk_rope_head_dim",
        ),
        assumes={**SILU_WITHOUT_BIAS, "scale_emb": (12,), "scale_depth": (1.4,), "dim_model_base": (256,)},
        rope=("longrope",),
        keys=_MINICPM_KEYS,
        unadapted=(".attn_q_a.weight", ".attn_q_b.weight", ".attn_kv_a_mqa.weight", ".attn_kv_b.weight"),
        refuses=other_minicpm,
        notes="latent queries, keys and values",
    ),
    replace(
        _DEEPSEEK_V3,
        kind=DecoderClass(
            "YoutuForCausalLM",
            {
                "num_key_value_heads": 16,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
                "rope_interleave": True,
            },
            width="qk_rope_head_dim",
        ),
        experts=(),
        dense="",
        keys=_YOUTU_KEYS,
        heads=None,
        notes="latent keys and values",
    ),
    replace(
        _DEEPSEEK_V3,
        kind=DecoderClass(
            "Glm4MoeLiteForCausalLM",
            {
                "num_key_value_heads": 20,
                "max_position_embeddings": 202752,
                "rms_norm_eps": 1e-5,
                "n_routed_experts": 64,
                "n_shared_experts": 1,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1536,
                "routed_scaling_factor": 1.8,
                "norm_topk_prob": True,
                "n_group": 1,
                "topk_group": 1,
                "q_lora_rank": 768,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "rope_interleave": True,
            },
            width="qk_rope_head_dim",
        ),
        assumes={**_DEEPSEEK_V3.assumes, "first_k_dense_replace": (1,)},  # the class reads no such setting
        dense="",
        sparse=lambda _, layer: layer > 0,
        keys={**_LATENT_KEYS, "leading_dense_block_count": lambda _: 1},
        refuses=first_of(other_scale_of_yarn, other_latent_queries, _other_dense_layers),
        notes="latent keys and values: one projection becomes two; experts behind the first layer",
    ),
)
