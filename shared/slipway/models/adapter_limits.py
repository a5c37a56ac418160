"""Limits for numbers in an adapter's configuration: layers, ranks and counts are checked before anything is built."""

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
MOST_SAVED = 1024
"""Names in ``modules_to_save``, each of which peft compares with every module as an expression."""
_NO_COUNTS = ("seed", "key", "step", "tinit", "tfinal", "deltat", "token", "version")
"""Name parts of options whose numbers cost no memory."""
_RANKS = ("rank_pattern",)


def excess(config: Mapping[str, Any]) -> str:
    """Name the option of ``adapter_config.json`` that is infinite or beyond what any adapter has; return empty if none is."""
    layers = _layers(config.get("layer_replication"))
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
        largest = max((abs(number) for number in numbers if isinstance(number, int)), default=0)
        if largest > most:
            return f"{key} is or holds {largest}, and at most {most} is merged"
    return ""


def _layers(ranges: Any) -> int:
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
