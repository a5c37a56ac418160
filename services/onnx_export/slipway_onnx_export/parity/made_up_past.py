"""Give a decoder keys and values that no text has made, so that a few tokens show what it does beyond a long attention window."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import transformers

from slipway_onnx_export.parity.rows import Array

EDGE = 12
"""Tokens at the beginning whose keys are large. Queries look at one of them if they may, so results show which of them are seen."""

_FAR, _LARGE = 0.1, 8.0


def made_up(name: str, *, heads: int, tokens: int, size: int) -> Array:
    """Return keys or values of ``past_key_values.N.key|value``, always the same for a name. (1, heads, tokens, size)."""
    part = re.fullmatch(r"past_key_values\.(\d+)\.(key|value)", name)
    if part is None:
        raise ValueError(f"{name!r} is not a part of a decoder's cache")
    random = np.random.default_rng([int(part[1]), int(part[2] == "value")])
    values: Array = random.standard_normal((1, heads, tokens, size), dtype=np.float32)
    if part[2] == "key":
        values[:, :, :EDGE] *= _LARGE
        values[:, :, EDGE:] *= _FAR
    return values


def cached_shapes(model: Any) -> list[dict[str, tuple[int, int]]]:
    """Return the heads and their size that transformers' model caches as ``key`` and ``value``, by layer."""
    probe = transformers.DynamicCache(config=model.config)
    model(input_ids=torch.zeros((1, 1), dtype=torch.int64), past_key_values=probe, use_cache=True)
    return [
        {kind: (found.shape[1], found.shape[3]) for kind, found in (("key", layer.keys), ("value", layer.values))}
        for layer in probe.layers
    ]


def fill_cache(cache: Any, shapes: list[dict[str, tuple[int, int]]], *, tokens: int) -> None:
    """Fill an empty cache of transformers with what :func:`made_up` gives."""
    for number, layer in enumerate(shapes):
        keys, values = (
            torch.from_numpy(made_up(f"past_key_values.{number}.{kind}", heads=heads, tokens=tokens, size=size))
            for kind, (heads, size) in layer.items()
        )
        cache.update(keys, values, number)
