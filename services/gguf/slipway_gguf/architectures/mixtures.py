"""Architectures with attention in all layers, and experts in some or all. Data, and light.

Sources: llama.cpp's ``conversion/`` (a file for each family) and ``src/models/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway_gguf.architectures.entry import (
    CONFIG_VALUES,
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
    grouped_heads,
    limited_groups,
    other_chunks,
    other_latent_queries,
    other_period,
    other_scale_of_yarn,
)
from slipway_gguf.architectures.settings import (
    EVERY_LAYER,
    EXPERTS,
    ROUTED_EXPERTS,
    SIGMOID,
    SILU,
    SILU_WITHOUT_BIAS,
    SOFTMAX,
)
from slipway_gguf.architectures.views import every_second, half, of_heads, transposed_experts

_ROUTED_KEYS: Mapping[str, Key] = {
    "leading_dense_block_count": lambda numbers: numbers.count("first_k_dense_replace"),
    "expert_shared_count": lambda numbers: numbers.count("n_shared_experts"),
    "expert_gating_func": lambda _: SIGMOID,
    "expert_weights_scale": lambda numbers: numbers.number("routed_scaling_factor"),
    "expert_weights_norm": lambda numbers: numbers.flag("norm_topk_prob"),
}
_ROUTED: Mapping[str, tuple[Target, ...]] = {"mlp.gate.e_score_correction_bias": (Target("exp_probs_b.bias"),)}
_NEXT_LAYER = ("model.layers.{layer}.",)


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


def _absorbed(first: str, end: tuple[str, ...], *, turned: bool) -> Pieces:
    """Return the part of ``kv_b_proj`` that gives the keys, or the values, of each head from the latent vector."""

    def pieces(numbers: Numbers) -> tuple[Piece, ...]:
        start = numbers.whole(first) if first else 0
        view = of_heads(numbers.decoder.heads, start, sum(map(numbers.whole, end)))
        return (Piece(form=(lambda whole: transposed_experts(view(whole))) if turned else view),)

    return pieces


_LATENT: Mapping[str, tuple[Target, ...]] = {
    **_ROUTED,
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


_LATENT_KEYS: Mapping[str, Key] = {
    **_ROUTED_KEYS,
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


_MIXTRAL: Mapping[str, tuple[Target, ...]] = {
    "block_sparse_moe.experts.w1.weight": (Target("ffn_gate_exps.weight"),),
    "block_sparse_moe.experts.w2.weight": (Target("ffn_down_exps.weight"),),
    "block_sparse_moe.experts.w3.weight": (Target("ffn_up_exps.weight"),),
}

_BIASED: Mapping[str, tuple[Target, ...]] = {
    **_MIXTRAL,
    "block_sparse_moe.e_score_correction_bias": (Target("exp_probs_b.bias"),),
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


def _flat(_: Numbers) -> tuple[Piece, ...]:
    """Return a matrix of one row as a vector."""
    return (Piece(form=lambda whole: whole.reshape(-1)),)


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


def other_last_layer(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse layers without experts behind those that have some (ERNIE 4.5)."""
    end, layers = settings.get("moe_layer_end_index"), settings.get("num_hidden_layers")
    if end in (None, -1) or (isinstance(layers, int) and end == layers - 1):
        return ""
    return describe_assumption(architecture, "moe_layer_end_index", end, "experts up to the last layer")


def _shared_width(numbers: Numbers) -> int | None:
    return numbers.whole("moe_intermediate_size") * numbers.count("moe_num_shared_experts") or None


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
        "Qwen2MoeForCausalLM",
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
        "Qwen3MoeForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, **EVERY_LAYER, "norm_topk_prob": (True,)},
        experts=EXPERTS,
    ),
    Architecture(
        "llama",
        "MixtralForCausalLM",
        assumes=SILU,
        paired=True,
        experts=EXPERTS,
        tensors=_MIXTRAL,
    ),
    Architecture(
        "llama4",
        "Llama4ForCausalLM",
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
    ),
    Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        assumes=SILU,
        paired=True,
        experts=EXPERTS,
        tensors=GRANITE_EXPERTS,
    ),
    Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, "norm_topk_prob": (False,), "clip_qkv": ()},
        experts=EXPERTS,
        refuses=grouped_heads,
    ),
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        assumes={**SILU, "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        rope=("yarn",),
        rounds_yarn=True,
        has_windows=True,
        experts=EXPERTS,
        tensors=_GPT_OSS,
        keys={"expert_feed_forward_length": lambda numbers: numbers.whole("intermediate_size")},
        refuses=other_period,
    ),
    Architecture(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, "rope_interleave": (True,)},
        rope=("yarn",),
        experts=ROUTED_EXPERTS,
        dense="first_k_dense_replace",
        tensors=_LATENT,
        keys=_LATENT_KEYS,
        scales_yarn=True,
        unadapted=_UNADAPTED,
        refuses=first_of(other_scale_of_yarn, other_latent_queries),
        heads=Heads(_NEXT_LAYER),
    ),
    Architecture(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, "mlp_bias": (False,)},
        rope=("yarn",),
        experts=ROUTED_EXPERTS,
        dense="first_k_dense_replace",
        tensors=_LATENT,
        keys=_LATENT_V2_KEYS,
        scales_yarn=True,
        unadapted=_UNADAPTED,
        refuses=first_of(other_scale_of_yarn, other_latent_queries, limited_groups),
    ),
    Architecture(
        "glm4moe",
        "Glm4MoeForCausalLM",
        assumes={**SILU, "n_group": (1,), "topk_group": (1,)},
        partial=True,
        experts=ROUTED_EXPERTS,
        dense="first_k_dense_replace",
        tensors=_ROUTED,
        keys=_ROUTED_KEYS,
        heads=Heads(_NEXT_LAYER, {each: each for each in _NEXT_LAYER}),
    ),
    Architecture(
        "dots1",
        "Dots1ForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, "n_group": (1,), "topk_group": (1,)},
        experts=ROUTED_EXPERTS,
        dense="first_k_dense_replace",
        tensors=_ROUTED,
        keys=_ROUTED_KEYS,
        refuses=grouped_heads,
    ),
    Architecture(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
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
        "Ernie4_5_MoeForCausalLM",
        assumes={**SILU, "use_bias": (False,), "moe_layer_interval": (1,)},
        experts=("moe_num_experts",),
        dense="moe_layer_start_index",
        tensors={"mlp.moe_statics.e_score_correction_bias": (Target("exp_probs_b.bias", _flat),)},
        keys={
            "leading_dense_block_count": lambda numbers: numbers.count("moe_layer_start_index"),
            "interleave_moe_layer_step": lambda numbers: numbers.whole("moe_layer_interval"),
            "expert_used_count": lambda numbers: numbers.whole("moe_k"),
            "expert_shared_count": lambda numbers: numbers.count("moe_num_shared_experts"),
            "expert_shared_feed_forward_length": _shared_width,
        },
        refuses=other_last_layer,
    ),
    Architecture(
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        assumes=SILU_WITHOUT_BIAS,
        rope=("dynamic",),
        experts=("num_experts",),
        keys={
            "expert_used_count": lambda numbers: _same_of_all(numbers, "moe_topk"),
            "expert_feed_forward_length": lambda numbers: numbers.decoder.inner,
            "expert_shared_feed_forward_length": lambda numbers: numbers.decoder.inner,
        },
        refuses=other_by_layer,
    ),
)
