"""Check the sizes that an ``adapter_config.json`` or ``config.json`` asks for before anything is built from them.

The code of a model or adapter builds whatever the numbers say, even without weights.
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
