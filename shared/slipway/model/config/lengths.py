"""Find the lengths of texts beyond which a model computes otherwise, by its configuration.

A graph that ignores such a length is right for every shorter text. So only texts on both sides of it prove anything.
All functions take a configuration of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GROWING, SWITCHING = "dynamic", "longrope"
"""Types of rotary embeddings whose frequencies depend on the longest text of a call: they change with it, or there are two sets."""
_LOCAL = ("sliding_attention", "chunked_attention", "local")


def window_of(config: Any) -> int:
    """Return the tokens that local layers attend to, 0 if all layers have full attention.

    A text that is longer by some tokens shows whether a graph keeps to the window. Models name it differently: ``sliding_window``;
    ``attention_chunk_size`` (Llama 4); ``window_size`` (GPT-Neo); ``local_attention``, half of it on each side (ModernBERT, whose
    ``sliding_window`` is that half); ``attention_window`` of each layer (Longformer, LED); ``local_radius`` on each side (LongT5).
    BigBird leaves full attention where a text is longer than five blocks and the random ones on both sides.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        return int((5 + 2 * config.num_random_blocks) * config.block_size)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds and not set(kinds) & set(_LOCAL):
        return 0
    names = ["sliding_window", "attention_window", "local_radius"]
    if kinds and "chunked_attention" in kinds:
        names.append("attention_chunk_size")
    if kinds and "local" in kinds:
        names.append("window_size")
    return max((_tokens(getattr(config, name, None)) for name in names), default=0)


def rope_types(config: Any) -> set[str]:
    """Return the types of rotary embeddings that a configuration names, for all layers or by their type."""
    return {str(each["rope_type"]) for each in _rotary_settings(config) if "rope_type" in each}


def grows_with_text(config: Any) -> bool:
    """Return whether the model takes texts beyond the length of its training by changing its rotary frequencies with each token."""
    return GROWING in rope_types(config)


def position_thresholds(config: Any) -> tuple[int, ...]:
    """Return the numbers of tokens beyond which a token's position counts otherwise, ascending.

    Only positions decide, so a few tokens at late positions show it: rotary frequencies that change, and queries that are scaled
    by their position (Ministral 3).
    """
    trained = getattr(config, "max_position_embeddings", None)
    lengths: list[Any] = []
    for settings in _rotary_settings(config):
        original = settings.get("original_max_position_embeddings")
        if settings.get("rope_type") == GROWING:
            lengths += [original, trained]
        elif settings.get("rope_type") == SWITCHING or settings.get("llama_4_scaling_beta"):
            lengths.append(original or getattr(config, "original_max_position_embeddings", None) or trained)
    return _ascending(lengths)


def length_thresholds(config: Any) -> tuple[int, ...]:
    """Return all numbers of tokens beyond which a model computes otherwise: its attention window too, and Llama 4's attention temperature."""
    scaled = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", None) else None
    return _ascending([*position_thresholds(config), window_of(config), scaled])


def _rotary_settings(config: Any) -> Iterator[dict[str, Any]]:
    settings = getattr(config, "rope_parameters", None)
    if isinstance(settings, dict):
        yield settings
        yield from (each for each in settings.values() if isinstance(each, dict))


def _ascending(lengths: list[Any]) -> tuple[int, ...]:
    return tuple(sorted({size for size in map(_tokens, lengths) if size}))


def _tokens(value: Any) -> int:
    sizes = value if isinstance(value, (list, tuple)) else [value]
    return max((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), default=0)
