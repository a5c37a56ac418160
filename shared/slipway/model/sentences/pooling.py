"""Make one vector of a text's token vectors.

Axes: B = batch, S = tokens, H = width of a token's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SENTENCE_EMBEDDING = "sentence_embedding"
"""Name of the vector in sentence-transformers, and of the output of a graph."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How token vectors become one vector.

    Attributes:
        modes: Keys of :data:`MODES`; the vectors of several are joined in this order.
        normalized: Whether the vector gets the length 1.
    """

    modes: tuple[str, ...]
    normalized: bool


def _first(hidden: Any, mask: Any) -> Any:
    return (hidden * mask * (mask.cumsum(1) == 1)).sum(1)


def _last(hidden: Any, mask: Any) -> Any:
    return (hidden * mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))).sum(1)


def _largest(hidden: Any, mask: Any) -> Any:
    return hidden.masked_fill(mask == 0, float("-inf")).amax(1)


def _mean(hidden: Any, mask: Any) -> Any:
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def _mean_by_root(hidden: Any, mask: Any) -> Any:
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9).sqrt()


def _weighted_mean(hidden: Any, mask: Any) -> Any:
    return _mean(hidden, mask * mask.cumsum(1))


MODES: Mapping[str, Callable[[Any, Any], Any]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""Functions from token vectors (B, S, H) and a mask (B, S, 1) to vectors (B, H), by sentence-transformers' names."""


def pool(hidden: Any, mask: Any, pooling: Pooling) -> Any:
    """Return the vector of each text, (B, H · modes). hidden: (B, S, H); mask: (B, S), 1 for a token and 0 for padding."""
    import torch

    weights = mask.unsqueeze(-1).to(hidden.dtype)
    made = torch.cat([MODES[mode](hidden, weights) for mode in pooling.modes], dim=-1)
    return made / made.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-12) if pooling.normalized else made
