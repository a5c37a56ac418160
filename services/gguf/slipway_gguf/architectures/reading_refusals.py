"""Say why llama.cpp's graph does not compute an embedder or a reranker, from its ``config.json`` alone. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.decoders.decoder import FULL, LOCAL
from slipway_gguf.architectures.entry import Architecture
from slipway_gguf.architectures.refusals import describe_assumption, other_period

_LOCAL_BASE = 10_000.0
"""Base of the rotary embedding in layers with a window, for which a graph reads no key."""
_PERIOD = 3
"""ModernBERT's period of layers with full attention, if no setting says it."""


def several_labels(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a head of several labels: llama.cpp's server reads one score of a text."""
    named = settings.get("id2label")
    labels = len(named) if isinstance(named, Mapping) else settings.get("num_labels", 2)
    return "" if labels == 1 else describe_assumption(architecture, "num_labels", labels, "one label, the score")


def pairs_of_two_types(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a reranker that tells the two texts of a pair by types of tokens: llama.cpp gives all tokens the first type (BERT)."""
    types = settings.get("type_vocab_size")
    return "" if types in (0, 1) else describe_assumption(architecture, "type_vocab_size", types, "one type of tokens")


def another_gemma(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse a Gemma 3 whose tokens see none behind them, another pattern of windows, and another scale of attention (EmbeddingGemma)."""
    if settings.get("use_bidirectional_attention") is not True:
        value = settings.get("use_bidirectional_attention")
        return describe_assumption(architecture, "use_bidirectional_attention", value, "true")
    scalar, width = settings.get("query_pre_attn_scalar"), settings.get("head_dim")
    if scalar != width:
        return describe_assumption(architecture, "query_pre_attn_scalar", scalar, f"head_dim, {width}")
    base = _local_base(settings)
    if base != _LOCAL_BASE:
        return describe_assumption(architecture, "rope_local_base_freq", base, f"{_LOCAL_BASE:g}")
    return other_period(architecture, settings)


def another_modern_bert(architecture: Architecture, settings: Mapping[str, Any]) -> str:
    """Refuse another pattern of windows than a first layer of each period without one, and scalings of the rotary embedding (ModernBERT)."""
    period, kinds = modern_period(settings), settings.get("layer_types")
    if isinstance(kinds, list) and kinds != [LOCAL if layer % period else FULL for layer in range(len(kinds))]:
        what = "full attention in the first layer of each period, and in no other"
        return describe_assumption(architecture, "layer_types", kinds, what)
    given = settings.get("rope_parameters") or {}
    listed = [each for each in given.values() if isinstance(each, Mapping)] if isinstance(given, Mapping) else []
    scaled = any(each.get("rope_type", "default") != "default" for each in listed) or settings.get("rope_scaling")
    return describe_assumption(architecture, "rope_parameters", given, "no scaling") if scaled else ""


def modern_period(settings: Mapping[str, Any]) -> int:
    """Return the number of layers from one with full attention to the next (ModernBERT), which transformers 5 writes as a list of kinds."""
    kinds, stated = settings.get("layer_types"), settings.get("global_attn_every_n_layers")
    if isinstance(kinds, list) and kinds:
        return next((number for number, kind in enumerate(kinds) if number and kind == FULL), len(kinds))
    return stated if isinstance(stated, int) and stated > 0 else _PERIOD


def _local_base(settings: Mapping[str, Any]) -> object:
    given = settings.get("rope_parameters") or {}
    local = given.get(LOCAL) if isinstance(given, Mapping) else None
    named = local.get("rope_theta") if isinstance(local, Mapping) else None
    return named if named is not None else settings.get("rope_local_base_freq")
