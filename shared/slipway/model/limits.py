"""Limits in a configuration: the sizes that can be built, and the lengths beyond which a model computes otherwise.

Sizes are checked before anything is built: the code of a model or adapter builds whatever the numbers of a ``config.json`` or
``adapter_config.json`` say, even without weights.

A graph that ignores a length beyond which its model computes otherwise is right for every shorter text. So only texts on both sides
of it prove anything. The functions about lengths take a configuration of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

MOST_LAYERS = 4096
"""Layers that ``layer_replication`` may make."""
MOST_RANK = 1 << 16
"""Largest rank of a factor; no layer of a known model has as many rows or columns."""
MOST_COUNT = 1 << 20
"""Limit for any other whole number, such as the number of vectors that layers share."""
MOST_TIMES = 256
"""Limit for numbers of repetitions, each with layers of its own or a product of matrices."""
_TIMES = ("depth", "niter", "terms")
"""Name parts of options that count repetitions."""
MOST_SAVED = 1024
"""Names in ``modules_to_save``, each of which peft compares with every module as an expression."""
_NO_COUNTS = ("seed", "key", "step", "tinit", "tfinal", "deltat", "token", "version")
"""Name parts of options whose numbers cost no memory."""
_RANKS = ("rank_pattern",)
MOST_PARTS = 1 << 16
"""Heads, experts or labels: a list of each is built."""
MOST_EXPERTS = 1 << 18
"""Experts of all layers together; the largest known mixture has 23,040."""
MOST_POSITIONS = 1 << 24
"""Places in a text: the longest known contexts have ten million."""
MOST_POSITIONS_OF_TABLE = 1 << 17
"""The same of encoder–decoders, many of which fill a table of sines with a loop in Python."""
_POSITIONS = (
    "position_embeddings",
    "n_positions",
    "_target_positions",
    "_source_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
)
_PARTS = ("layer", "head", "expert", "depth", "label")
_LAYERS = ("layer", "layers", "depth", "depths", "num_blocks")
"""Ends of the names of settings that count layers, each of which is many objects."""
_REPEATED = "attention_types"
"""GPT-Neo's layers, as ``[[types, times], …]``."""

GROWING, SWITCHING = "dynamic", "longrope"
"""Types of rotary embeddings whose frequencies depend on the longest text of a call: they change with it, or there are two sets."""
_LOCAL_ATTENTION = ("sliding_attention", "chunked_attention", "local")


def adapter_excess(config: Mapping[str, Any]) -> str:
    """Name the option of ``adapter_config.json`` that is infinite or beyond what any adapter has; return empty if none is."""
    layers = _replicated_layers(config.get("layer_replication"))
    if layers > MOST_LAYERS:
        return f"layer_replication makes {layers} layers, and at most {MOST_LAYERS} are merged"
    saved = config.get("modules_to_save")
    if isinstance(saved, list) and len(saved) > MOST_SAVED:
        return f"modules_to_save has {len(saved)} names, and at most {MOST_SAVED} are taken"
    for key, option in sorted(config.items()):
        numbers = list(_numbers(option))
        if not all(map(math.isfinite, numbers)):
            return f"{key} is or holds {next(it for it in numbers if not math.isfinite(it))}, which is no finite number"
        if key == "layer_replication" or any(part in key.lower() for part in _NO_COUNTS):
            continue
        most = MOST_RANK if key == "r" or key.endswith("_r") or key in _RANKS else MOST_COUNT
        most = MOST_TIMES if any(part in key.lower() for part in _TIMES) else most
        largest = max((abs(number) for number in numbers if isinstance(number, int)), default=0)
        if largest > most:
            return f"{key} is or holds {largest}, and at most {most} is merged"
    return ""


def _replicated_layers(ranges: Any) -> int:
    """Return the number of layers in well-formed ranges; others are refused where they are read."""
    pairs = ranges if isinstance(ranges, list) else []
    return sum(
        max(0, pair[1] - pair[0])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(end, int) for end in pair)
    )


def _numbers(value: Any) -> Iterator[float]:
    match value:
        case bool():
            return
        case int() | float():
            yield value
        case dict():
            for part in value.values():
                yield from _numbers(part)
        case list():
            for part in value:
                yield from _numbers(part)


def model_excess(config: Mapping[str, Any]) -> str:
    """Say which setting of ``config.json`` asks for more than can be built; empty if none does."""
    settings = list(_settings(config))
    most_positions = MOST_POSITIONS_OF_TABLE if config.get("is_encoder_decoder") is True else MOST_POSITIONS
    for key, value in settings:
        if key == _REPEATED and (layers := _repeated_layers(value)) > MOST_LAYERS:
            return f"{key} of {layers} layers, and at most {MOST_LAYERS} can be built"
        counts = _counts(value)
        # Stages of several layers are listed; other lists hold the numbers of single layers.
        layers = sum(counts) if key.endswith("depths") else max(counts, default=0)
        if key.endswith(_LAYERS) and layers > MOST_LAYERS:
            return f"{key} {layers}, and at most {MOST_LAYERS} can be built"
        largest = max(counts, default=0)
        if any(part in key for part in _PARTS) and largest > MOST_PARTS:
            return f"{key} {largest}, and at most {MOST_PARTS} can be built"
        if key.endswith(_POSITIONS) and largest > most_positions:
            return f"{key} {largest}, and at most {most_positions} can be built"
    layers, experts = _largest(settings, _LAYERS), _largest(settings, ("experts",))
    if layers * experts > MOST_EXPERTS:
        return f"{layers} layers of {experts} experts, and at most {MOST_EXPERTS} experts can be built"
    return ""


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting, also of the models within a model, with its name in small letters."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _settings(value)
        else:
            yield key.lower(), value


def _counts(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [count for count in values if isinstance(count, int) and count > 0]


def _largest(settings: list[tuple[str, Any]], ends: tuple[str, ...]) -> int:
    return max((count for key, value in settings if key.endswith(ends) for count in _counts(value)), default=0)


def _repeated_layers(value: Any) -> int:
    pairs = value if isinstance(value, list) else []
    return sum(
        len(pair[0]) * pair[1]
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list | str) and isinstance(pair[1], int)
    )


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
    if kinds and not set(kinds) & set(_LOCAL_ATTENTION):
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
