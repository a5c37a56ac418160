"""Decide how the comparison passes the lengths beyond which a model computes otherwise; see ``reach.py`` for attention windows.

A graph that ignores such a length gives right results for every shorter text, so a comparison of short texts proves nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipway.model.config.lengths import grows_with_text, length_thresholds, position_thresholds
from slipway.model.families import DECODER
from slipway_onnx_export.parity.reach import BEYOND
from slipway_onnx_export.source import WINDOW_LIMIT, ModelSource

SHORT = 128
"""Longest threshold that a decoder's text passes; beyond it, a few tokens at late positions cost less and show the same."""


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
    """Return how many tokens a text must be able to have if rotary frequencies grow: more than the model was trained with; otherwise 0."""
    growing = [position_thresholds(each)[-1:] for each in _configs(source) if grows_with_text(each)]
    return max((size + 2 * BEYOND for sizes in growing for size in sizes), default=0)


def _thresholds(source: ModelSource) -> dict[int, bool]:
    """Return whether positions alone pass each threshold, ascending. An attention window is none of them."""
    found: dict[int, bool] = {}
    for config in _configs(source):
        positional = position_thresholds(config)
        for size in length_thresholds(config):
            if size in positional or size != source.sliding_window:
                found[size] = found.get(size, True) and size in positional
    return dict(sorted(found.items()))


def _configs(source: ModelSource) -> list[Any]:
    """Return the configurations of a model's decoder and of its encoder, where that has one of its own."""
    encoder = getattr(source.config, "encoder", None)
    return [source.text_config, *([encoder] if hasattr(encoder, "get_text_config") else [])]
