"""Choose how the comparison passes the lengths, attention windows among them, beyond which a model computes otherwise.

A graph that ignores such a length gives right results for every shorter text, so a comparison of short texts proves nothing about it.

Exporters drop a window silently. Beyond a long one, a decoder gets keys and values that no text has made, so that a few tokens
show what it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from slipway.model.families import DECODER
from slipway.model.limits import grows_with_text, length_thresholds, position_thresholds
from slipway.sizes import format_size
from slipway_onnx_export.parity.rows import Array
from slipway_onnx_export.source import WINDOW_LIMIT, ModelSource

SHORT = 128
"""Longest threshold that a decoder's text passes; beyond it, a few tokens at late positions cost less and show the same."""

EDGE = 12
"""Tokens at the beginning whose keys are large. Queries look at one of them if they may, so results show which of them are seen."""

_FAR, _LARGE = 0.1, 8.0

BEYOND = 4
"""Tokens by which a text is longer than the window."""

NEW = (3, 1)
"""New tokens of the calls after a made-up past. The first of them does not see ``EDGE - sum(NEW)`` of its tokens, the last none of the edge."""

_MOST, _SMALL = 8, 64 << 20
"""A made-up past takes up to this part of the weights' size, or so many bytes."""

_COPIES = 4
"""Copies of it in memory: a graph's input, its output, what ONNX Runtime keeps of that, and attention's own."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How the comparison passes a model's thresholds, in tokens.

    Attributes:
        texts: Thresholds for which texts on both sides are compared.
        positions: Thresholds for which tokens at positions on both sides are compared.
        unseen: Thresholds beyond which nothing is compared, and why.
    """

    texts: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    unseen: Mapping[int, str] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, str]:
        """Describe each threshold for ``onnx_export.json``."""
        compared = dict.fromkeys((*self.texts, *self.positions), "compared")
        unseen = {size: f"not compared: {why}" for size, why in self.unseen.items()}
        return {str(size): said for size, said in sorted({**compared, **unseen}.items())}


def lengths_of(source: ModelSource, *, room: int, shared: bool = False) -> Lengths:
    """Return how the comparison passes the model's thresholds.

    Args:
        source: The model.
        room: Tokens that a text may have in the model and its graphs.
        shared: Whether past and present are one buffer. Such a graph counts positions itself.
    """
    texts, positions, unseen = [], [], {}
    for size, positional in _thresholds(source).items():
        late = positional and source.family is DECODER and not shared
        if room <= size:
            continue
        if room < size + BEYOND:
            unseen[size] = f"there is room for {room} tokens, too few to pass {size}"
        elif size <= (SHORT if late else WINDOW_LIMIT):
            texts.append(size)
        elif late:
            positions.append(size)
        else:
            unseen[size] = f"a text of more than {size} tokens would take too long"
    return Lengths(tuple(texts), tuple(positions), unseen)


def room_beyond(source: ModelSource) -> int:
    """Return the room that a text needs, in tokens, if rotary frequencies grow beyond the trained length; otherwise 0."""
    growing = [position_thresholds(each)[-1:] for each in _configs(source) if grows_with_text(each)]
    return max((size + 2 * BEYOND for sizes in growing for size in sizes), default=0)


def _thresholds(source: ModelSource) -> dict[int, bool]:
    """Return the thresholds, ascending, each with whether positions alone pass it. The attention window is not among them."""
    thresholds: dict[int, bool] = {}
    for config in _configs(source):
        positional = position_thresholds(config)
        for size in length_thresholds(config):
            if size in positional or size != source.sliding_window:
                thresholds[size] = thresholds.get(size, True) and size in positional
    return dict(sorted(thresholds.items()))


def _configs(source: ModelSource) -> list[Any]:
    """Return the configurations of a model's decoder and of its encoder, where that has one of its own."""
    encoder = getattr(source.config, "encoder", None)
    return [source.text_config, *([encoder] if hasattr(encoder, "get_text_config") else [])]


def make_up_values(name: str, *, heads: int, tokens: int, size: int) -> Array:
    """Make up keys or values of ``past_key_values.N.key|value``, always the same for a name. (1, heads, tokens, size)."""
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
    """Return the heads and their size that transformers' model caches as ``key`` and ``value``, by layer; layers that read others' have none."""
    probe = transformers.DynamicCache(config=model.config)
    model(input_ids=torch.zeros((1, 1), dtype=torch.int64), past_key_values=probe, use_cache=True)
    return [
        {
            kind: (tensor.shape[1], tensor.shape[3])
            for kind, tensor in (("key", layer.keys), ("value", layer.values))
            if tensor is not None
        }
        for layer in probe.layers
    ]


def fill_cache(cache: Any, shapes: list[dict[str, tuple[int, int]]], *, tokens: int) -> None:
    """Fill an empty cache of transformers by :func:`make_up_values`."""
    for number, layer in ((number, layer) for number, layer in enumerate(shapes) if layer):
        keys, values = (
            torch.from_numpy(make_up_values(f"past_key_values.{number}.{kind}", heads=heads, tokens=tokens, size=size))
            for kind, (heads, size) in layer.items()
        )
        cache.update(keys, values, number)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the comparison reaches.

    Attributes:
        window: Tokens that local layers attend to, 0 if all attention is full.
        text: Whether a text beyond the window is compared.
        past: Tokens of a made-up past that is compared instead of a text; 0 for none.
        why: Why nothing beyond the window is compared; otherwise empty.
        matters: Whether a graph could be wrong there: a text can be longer than the window.
    """

    window: int
    text: bool = False
    past: int = 0
    why: str = ""
    matters: bool = True

    @property
    def record(self) -> str:
        """Describe it for ``onnx_export.json``."""
        return f"not compared: {self.why}" if self.why else "compared"


def reach_of(
    source: ModelSource, *, room: int, cached: bool = True, shared: bool = False, spare_bytes: int = 4 << 30
) -> Reach:
    """Return how the comparison passes the model's window.

    Args:
        source: The model.
        room: Tokens that a text may have in the model and its graphs.
        cached: Whether the graphs have a cache.
        shared: Whether past and present are one buffer.
        spare_bytes: Memory that the comparison of short texts leaves.
    """
    window = source.sliding_window
    if not window:
        return Reach(0)
    if room <= window:
        return Reach(window, why=f"no text of {room} tokens at most is beyond {window}", matters=False)
    text = window <= WINDOW_LIMIT
    past = 0 if text else window + EDGE - sum(NEW)
    why = ""
    if not text and (source.family is not DECODER or not cached or shared):
        why = f"a text beyond the window of {window} tokens would take too long"
    elif room < (window + BEYOND + 1 if text else past + sum(NEW)):
        why = f"there is room for {room} tokens, too few to pass the window of {window}"
    elif past:
        needed = _cache_bytes(source, tokens=past)
        most = max(0, min(max(source.fp32_bytes // _MOST, _SMALL), spare_bytes // _COPIES))
        if needed > most:
            what = f"{format_size(needed)} for keys and values of the window of {window} tokens"
            why = f"{what}, more than the {format_size(most)} that this comparison may take"
    return Reach(window, why=why) if why else Reach(window, text=text, past=past)


def _cache_bytes(source: ModelSource, *, tokens: int) -> int:
    config = source.text_config
    heads = int(config.num_attention_heads)
    cached = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * 4 * source.layers * cached * size * tokens
