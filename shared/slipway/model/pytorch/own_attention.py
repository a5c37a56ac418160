"""Attention in a form that a format's runtime can compute, in place of transformers' own.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

_HARMLESS = ("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions")
"""Arguments that are already in the mask or the cache."""


class Attend(Protocol):
    """Computes attention of one row; a format's own, which is traced."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return (1, S, H, D). query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L), added to scores.

        ``scaling`` is None for that of the width, D ** -0.5; ``softcap`` caps scores by tanh.
        """
        ...


def use_attention(
    model: Any,
    name: str,
    attend: Attend,
    *,
    mask: Callable[..., torch.Tensor] = eager_mask,
    unread: Collection[str] = (),
) -> None:
    """Make a transformers model use attention of our own, unless its class computes attention itself.

    Args:
        model: The model.
        name: Name under which transformers knows the attention.
        attend: Computes it.
        mask: Makes its mask, as transformers' mask functions do.
        unread: Further arguments that classes pass and no attention reads.
    """
    AttentionInterface.register(name, _as_transformers_calls(attend, (*_HARMLESS, *unread)))
    AttentionMaskInterface.register(name, mask)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def use_transformers_attention(model: Any) -> None:
    """Make a model use transformers' own attention again."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


def _as_transformers_calls(attend: Attend, harmless: Collection[str]) -> Callable[..., tuple[torch.Tensor, None]]:
    def attention(
        module: torch.nn.Module,  # noqa: ARG001 - part of the interface, as dropout
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,  # noqa: ARG001
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Raises:
            ValueError: The model needs more than masked, scaled and capped products.
        """
        odd = sorted(name for name, given in others.items() if given is not None and name not in harmless)
        if odd:
            raise ValueError(f"its attention takes {odd[0]}")
        return attend(query, key, value, attention_mask, scaling=scaling, softcap=softcap), None

    return attention
