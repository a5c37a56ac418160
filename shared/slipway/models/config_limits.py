"""How large a model a ``config.json`` may ask for: its code builds whatever the numbers say, even of a model without weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipway.models.adapter_limits import MOST_LAYERS

MOST_PARTS = 1 << 16
"""Heads, experts or labels: a list of each is built."""
MOST_EXPERTS = 1 << 18
"""Experts of all layers together; the largest known mixture has 23,040."""
_PARTS = ("layer", "head", "expert", "depth", "label")
_LAYERS = ("layer", "layers", "depth", "depths", "num_blocks")
"""Ends of the names of settings that count layers, each of which is many objects."""
_REPEATED = "attention_types"
"""GPT-Neo's layers, as ``[[types, times], …]``."""


def excess(config: Mapping[str, Any]) -> str:
    """Say which setting of ``config.json`` asks for more than can be built; empty if none does."""
    found = list(_settings(config))
    for key, value in found:
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
    layers, experts = _largest(found, _LAYERS), _largest(found, ("experts",))
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
