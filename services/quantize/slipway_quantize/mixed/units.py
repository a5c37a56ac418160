"""Which weights have the same number of bits, because graphs for serving and vLLM join them to one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are joined, by the last part of their names."""
_JOINED = "+"
"""Stands between the parts of a weight that is joined already."""


def units(names: Iterable[str]) -> list[list[str]]:
    """Return the names of weights in groups that have the same number of bits, in the order of their first."""
    found: dict[tuple[str, Any], list[str]] = {}
    for name in names:
        path, _, last = name.removesuffix(".T").removesuffix(".weight").rpartition(".")
        fused = next((parts for parts in _FUSED if set(last.split(_JOINED)) <= set(parts)), None)
        found.setdefault((path, fused or last), []).append(name)
    return list(found.values())
