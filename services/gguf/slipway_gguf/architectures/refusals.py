"""Say why a model's settings are not computed by a graph of llama.cpp, from its ``config.json`` alone. Light."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder import FULL, LOCAL
from slipway.model.limits import MOST_LAYERS
from slipway.texts import quoted
from slipway_gguf.architectures.entry import Architecture, Refusal

_GREATER = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the largest model, in which llama.cpp scales attention by a head's share of the hidden size."""
EXAONE_LAYERS = 64
"""Number of layers of the largest EXAONE 4, the only one in which llama.cpp computes windows."""
_LARGE = 64
"""Number of layers of the largest Cohere, from which on llama.cpp reads norms of queries and keys."""
_LINEAR = "linear_attention"
CHUNKED = "chunked_attention"
_UNROTATED, _WITHOUT_NORMS = 4, 128
"""Llama 4: period of the layers that are not rotated, and the number of experts of models without norms of queries and keys."""
_DIRECT_QUERIES, _KANANA = (26, 27), (48, 128256)
"""Numbers of layers in which llama.cpp reads no latent queries for DeepSeek's graph; a number of layers with that of tokens."""
_SHORT_STEP = 0.001
"""Least time step that transformers takes for Nemotron-H by default, and llama.cpp does not know."""


def describe_assumption(architecture: Architecture, key: str, value: object, expected: str) -> str:
    """Return the sentence for a setting that has another value than the graph assumes."""
    return f"{key} is {quoted(value)} in config.json, and llama.cpp computes {architecture.class_name} with {expected}"


def first_of(*refusals: Refusal) -> Refusal:
    """Return a function that returns the first reason of several."""

    def refuse(architecture: Architecture, settings: Mapping[str, Any]) -> str:
        return next(filter(None, (each(architecture, settings) for each in refusals)), "")

    return refuse


def other_windows(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another pattern of windows than one layer without in each period, soft-capping, and another scale of attention (Gemma)."""
    reason = other_period(architecture, settings)
    if reason:
        return reason
    for key in (key for key in architecture.kind.defaults if key.endswith("_softcapping")):
        if settings.get(key) is None:
            return describe_assumption(architecture, key, None, "a number")
    width = settings.get("head_dim")
    if settings.get("num_hidden_layers") == _GREATER[architecture.name]:
        for key in ("hidden_size", "num_attention_heads"):
            if not isinstance(settings.get(key), int) or not settings[key]:
                return describe_assumption(architecture, key, settings.get(key), "a whole number from 1")
        width = settings["hidden_size"] // settings["num_attention_heads"]
    scalar = settings.get("query_pre_attn_scalar")
    return "" if scalar == width else describe_assumption(architecture, "query_pre_attn_scalar", scalar, str(width))


def other_period(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another pattern of windows than full attention in each layer of a period."""
    period, kinds = architecture.kind.period, settings.get("layer_types")
    if isinstance(kinds, list) and kinds != [LOCAL if (layer + 1) % period else FULL for layer in range(len(kinds))]:
        return describe_assumption(architecture, "layer_types", kinds, f"full attention in every layer number {period}")
    if settings.get("sliding_window") is None:
        return describe_assumption(architecture, "sliding_window", None, "a number")
    pattern = settings.get("sliding_window_pattern", period)
    if pattern != period:
        return describe_assumption(architecture, "sliding_window_pattern", pattern, str(period))
    return ""


def unlisted_windows(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a model whose layers have no window, or one by another rule than its class's where no list says which."""
    period = architecture.kind.period
    if settings.get("sliding_window") is None:
        return describe_assumption(architecture, "sliding_window", None, "a number")
    pattern = settings.get("sliding_window_pattern")
    if settings.get("layer_types") is None and pattern not in (None, period):
        return describe_assumption(architecture, "sliding_window_pattern", pattern, str(period))
    return ""


def other_width(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse heads of another width than the hidden size by their number, where shapes of tensors follow from that."""
    width, hidden, heads = (settings.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if (
        width is None
        or not isinstance(hidden, int)
        or not isinstance(heads, int)
        or heads < 1
        or width == hidden // heads
    ):
        return ""
    return describe_assumption(architecture, "head_dim", width, f"hidden_size / num_attention_heads, {hidden // heads}")


def other_minicpm(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse scales that a setting of null turns off, queries that come from the states directly, and shared heads (MiniCPM 3)."""
    key = next((key for key in ("scale_depth", "dim_model_base") if settings.get(key) is None), "")
    if key:
        return describe_assumption(architecture, key, None, " or ".join(map(quoted, architecture.assumes[key])))
    return without_latent_queries(architecture, settings) or grouped_heads(architecture, settings)


def other_local_base(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another base of the rotary embedding in layers with a window than in those without."""
    given = settings.get("rope_parameters") or {}
    parts = [given.get(kind) or {} for kind in (FULL, LOCAL)] if isinstance(given, Mapping) else []
    full, local = (
        part.get("rope_theta", settings.get(key)) if isinstance(part, Mapping) else None
        for part, key in zip(parts or [{}, {}], ("rope_theta", "rope_local_base_freq"), strict=True)
    )
    return "" if full == local else describe_assumption(architecture, "rope_theta", local, f"{full} in all layers")


def largest_without_windows(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse the number of layers of the largest EXAONE 4, in which llama.cpp always computes windows."""
    if settings.get("num_hidden_layers") != EXAONE_LAYERS:
        return ""
    return describe_assumption(architecture, "sliding_window", None, f"a number in {EXAONE_LAYERS} layers")


def other_attention(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a scale of attention of its own, and norms of queries and keys (MPT, whose settings of attention are an object)."""
    attention = settings.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        return describe_assumption(architecture, "attn_config", attention, "an object")
    given = {key: attention.get(key) for key in ("softmax_scale", "qk_ln", "prefix_lm")}
    key = next((key for key, value in given.items() if value), "")
    return describe_assumption(architecture, key, given[key], "no such setting") if key else ""


def other_head_norms(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse norms of queries and keys in a smaller model than the largest, and a larger one without them (Cohere)."""
    layers, norms = settings.get("num_hidden_layers"), bool(settings.get("use_qk_norm"))
    if not isinstance(layers, int) or norms == (layers >= _LARGE):
        return ""
    return describe_assumption(architecture, "use_qk_norm", norms, f"true from {_LARGE} layers on, and otherwise false")


def other_rotation(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse rotation in other layers than three of four (SmolLM3)."""
    rotated = settings.get("no_rope_layers")
    expected = [int((layer + 1) % 4 != 0) for layer in range(len(rotated))] if isinstance(rotated, list) else None
    if rotated == expected:
        return ""
    return describe_assumption(architecture, "no_rope_layers", rotated, "no rotation in every fourth layer")


def other_chunks(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another pattern of rotated layers and of layers with experts, and norms of queries and keys where 128 experts are (Llama 4)."""
    layers, step = settings.get("num_hidden_layers"), settings.get("interleave_moe_layer_step")
    if not isinstance(layers, int) or not isinstance(step, int) or not 0 < layers <= MOST_LAYERS or step < 1:
        return ""  # wrong numbers are named when they are read
    rotated = settings.get("no_rope_layers")
    if not rotated and settings.get("no_rope_layer_interval") != _UNROTATED:
        interval = settings.get("no_rope_layer_interval")
        return describe_assumption(architecture, "no_rope_layer_interval", interval, str(_UNROTATED))
    unrotated = [(layer + 1) % _UNROTATED == 0 for layer in range(layers)]
    expected: tuple[tuple[str, list[Any], str], ...] = (
        ("no_rope_layers", [int(not each) for each in unrotated], "no rotation in every fourth layer"),
        (
            "layer_types",
            [FULL if each else CHUNKED for each in unrotated],
            "full attention in every fourth layer, and chunks in the others",
        ),
        ("moe_layers", list(range(step - 1, layers, step)), f"experts in every layer number {step}"),
    )
    for key, listed, words in expected:
        given = (settings.get(key) or None) if key == "no_rope_layers" else settings.get(key)
        if given is not None and given != listed:
            return describe_assumption(architecture, key, given, words)
    norms, many = bool(settings.get("use_qk_norm")), settings.get("num_local_experts") == _WITHOUT_NORMS
    return describe_assumption(architecture, "use_qk_norm", norms, str(not norms).lower()) if norms == many else ""


def other_linear_attention(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse heads of values that are not as wide as those of keys, and full attention in other layers than the last of each interval."""
    keys, values = settings.get("linear_key_head_dim"), settings.get("linear_value_head_dim")
    if keys != values:
        return describe_assumption(architecture, "linear_value_head_dim", values, f"linear_key_head_dim, {keys}")
    groups, heads = settings.get("linear_num_key_heads"), settings.get("linear_num_value_heads")
    if isinstance(groups, int) and isinstance(heads, int) and groups > 0 and heads % groups:
        return describe_assumption(
            architecture, "linear_num_value_heads", heads, f"a multiple of linear_num_key_heads, {groups}"
        )
    kinds = settings.get("layer_types")
    if not isinstance(kinds, list) or kinds == _in_intervals(interval_of(kinds), len(kinds)):
        return ""
    return describe_assumption(
        architecture, "layer_types", kinds, "full attention in the last layer of each interval, and in no other"
    )


def interval_of(kinds: Any) -> int:
    """Return the number of layers from one with full attention to the next; more than there are if none has."""
    return next((number for number, kind in enumerate(kinds, 1) if kind != _LINEAR), len(kinds) + 1)


def _in_intervals(interval: int, layers: int) -> list[str]:
    return [_LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]


def limited_steps(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse limits for the time steps of Mamba-2."""
    limits = settings.get("time_step_limit")
    if limits is None:
        return ""
    # transformers 5 writes infinity as an object.
    listed = limits if isinstance(limits, list | tuple) else ()
    ends = [math.inf if isinstance(each, Mapping) and "Infinity" in each.values() else each for each in listed]
    return "" if ends == [0.0, math.inf] else describe_assumption(architecture, "time_step_limit", limits, "no limit")


def lengthened_steps(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse time steps that transformers makes longer by more than rounding; those below 0.001 differ by up to 1e-4 in log probability."""
    least = settings.get("time_step_min")
    if least is None or (isinstance(least, int | float) and least <= _SHORT_STEP):
        return ""
    return describe_assumption(
        architecture, "time_step_min", least, f"steps of any length, which {_SHORT_STEP} comes near"
    )


def other_expansion(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse inner states that are not twice as wide as those between layers (Mamba)."""
    if settings.get("expand") != 2:
        return describe_assumption(architecture, "expand", settings.get("expand"), "2")
    inner, hidden = settings.get("intermediate_size"), settings.get("hidden_size")
    if inner is None or (isinstance(hidden, int) and inner == 2 * hidden):
        return ""
    return describe_assumption(architecture, "intermediate_size", inner, f"twice hidden_size, {hidden}")


def gate_behind_norm(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a norm of a recurrent layer that does not see the gate (Falcon-H1)."""
    if settings.get("mamba_rms_norm") and settings.get("mamba_norm_before_gate"):
        return describe_assumption(architecture, "mamba_norm_before_gate", True, "false, if mamba_rms_norm is true")
    return ""


def other_scale_of_yarn(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse YaRN that scales the rotary embedding and attention by different numbers (DeepSeek)."""
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return ""
    scale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scale and scale == of_all:
        return ""
    return describe_assumption(architecture, "mscale", scale, f"mscale_all_dim, {quoted(of_all)}, and not without it")


def dense_layers_beside_experts(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a Nemotron-H with layers of both kinds: one setting of the file says how wide they are."""
    kinds = settings.get("layers_block_type") or settings.get("layer_types") or settings.get("hybrid_override_pattern")
    both = isinstance(kinds, list | str) and ("mlp" in kinds or "-" in kinds)
    return describe_assumption(architecture, "layers_block_type", kinds, "experts alone") if both else ""


def without_latent_queries(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse queries that come from the states directly (MiniCPM 3)."""
    rank = settings.get("q_lora_rank")
    return "" if rank else describe_assumption(architecture, "q_lora_rank", rank, "a number")


def other_latent_queries(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse latent queries in those numbers of layers in which llama.cpp reads none (DeepSeek-V2-Lite and models like it)."""
    rank, layers = settings.get("q_lora_rank"), settings.get("num_hidden_layers")
    direct = layers in _DIRECT_QUERIES or (layers, settings.get("vocab_size")) == _KANANA
    return describe_assumption(architecture, "q_lora_rank", rank, f"null in {layers} layers") if rank and direct else ""


def limited_groups(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse experts of fewer groups than experts are taken: llama.cpp ranks groups by their two best experts, DeepSeek-V2 by the best one.

    As many groups as experts are no limit: the best experts are in the groups that have the best ones.
    """
    groups, used, experts = (settings.get(key) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    enough = used == groups or (isinstance(used, int) and isinstance(experts, int) and used >= experts)
    if settings.get("topk_method") == "greedy" or enough:
        return ""
    expected = f"experts of any group, or of at least num_experts_per_tok groups, {experts}"
    return describe_assumption(architecture, "topk_group", used, expected)


def grouped_heads(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse heads of keys that several heads of queries share (OLMoE, dots.1)."""
    heads, shared = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if shared in (None, heads):
        return ""
    return describe_assumption(architecture, "num_key_value_heads", shared, f"num_attention_heads, {heads}")


def without_yarn(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another rotary embedding than YaRN's, whose settings say how attention grows with the position (Ministral 3)."""
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kinds = (scaling.get("rope_type"), scaling.get("type")) if isinstance(scaling, Mapping) else ()
    return "" if "yarn" in kinds else describe_assumption(architecture, "rope_parameters", scaling, "yarn")


_SIZES_OF_LAYERS = {"head_dim", "num_key_value_heads"}
_KEEPING, _SPARSE, _SPARSITY = 20, 10, 0.95
"""Gemma 3n as llama.cpp knows it: the first layers keep keys and values, and the first of these are sparse."""


def other_gemma_3n(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse other windows, other layers that keep keys and values, and other sparse layers than those of the released models."""
    reason = other_period(architecture, settings)
    layers, shared = settings.get("num_hidden_layers"), settings.get("num_kv_shared_layers")
    if reason or not isinstance(layers, int):
        return reason
    if shared != layers - _KEEPING:
        return describe_assumption(architecture, "num_kv_shared_layers", shared, f"all but {_KEEPING} layers")
    sparse = settings.get("activation_sparsity_pattern")
    listed = isinstance(sparse, list) and len(sparse) == layers
    if not listed or sparse != [_SPARSITY] * _SPARSE + [0.0] * (layers - _SPARSE):
        what = f"{_SPARSITY} in the first {_SPARSE} layers, and 0 in the others"
        return describe_assumption(architecture, "activation_sparsity_pattern", sparse, what)
    return ""


def other_gemma_4(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another rotary embedding than a share of each head in layers with full attention, and whole heads in those with a window."""
    given = settings.get("rope_parameters") or {}
    parts = [given.get(each) or {} for each in (FULL, LOCAL)] if isinstance(given, Mapping) else [{}, {}]
    full, local = (each if isinstance(each, Mapping) else {"rope_type": None} for each in parts)
    kinds = (full.get("rope_type", "proportional"), local.get("rope_type", "default"))
    whole = local.get("partial_rotary_factor") in (None, 1.0)
    if kinds != ("proportional", "default") or not whole:
        expected = "proportional rotation in full attention and the default in windows"
        return describe_assumption(architecture, "rope_parameters", given, expected)
    return other_sizes_of_layers(architecture, settings) or other_shared_layers(architecture, settings)


def other_sizes_of_layers(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse sizes of single layers, unless all layers with full attention have the same, and no other layers have any."""
    given, kinds = settings.get("per_layer_config"), settings.get("layer_types")
    if not given or not isinstance(kinds, list):
        return ""
    full = {str(layer) for layer, kind in enumerate(kinds) if kind == FULL}
    layers = list(given.values()) if isinstance(given, Mapping) else []
    known = all(isinstance(each, Mapping) and each.keys() <= _SIZES_OF_LAYERS and each == layers[0] for each in layers)
    if layers and known and {*map(str, given)} == full:
        return ""
    expected = f"the same {' and '.join(sorted(_SIZES_OF_LAYERS))} in all layers with full attention"
    return describe_assumption(architecture, "per_layer_config", given, expected)


def other_shared_layers(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse layers that share keys and values, unless they share those of the two layers before them: one with a window, one without."""
    shared, listed = settings.get("num_kv_shared_layers"), settings.get("layer_types")
    if not isinstance(shared, int) or not shared or not isinstance(listed, list):
        return ""
    if listed[: len(listed) - shared][-2:] == [LOCAL, FULL]:
        return ""
    expected = "a window in the last but one of the layers that share nothing, and none in the last"
    return describe_assumption(architecture, "num_kv_shared_layers", shared, expected)


def without_rotation(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a model without a rotary embedding (Granite 4 with experts and attention in all layers)."""
    kind = settings.get("position_embedding_type")
    return "" if kind == "rope" else describe_assumption(architecture, "position_embedding_type", kind, "rope")
