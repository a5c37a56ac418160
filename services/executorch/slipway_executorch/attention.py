"""Attention as XNNPACK can compute it: matrix products of keys and values as they are stored, and a mask that is added.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "slipway_grouped"
_HARMLESS = ("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions")
"""Arguments that the mask or the cache has already answered."""


def use_grouped_attention(model: Any) -> None:
    """Let a model attend by :func:`attend`, unless its class computes attention in its own way."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


def attend(
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
    """Attend without copying keys and values for each head of queries that shares them.

    query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L), added; result (1, S, H, D).

    Raises:
        ValueError: The model asks for something else than masked, scaled and capped products.
    """
    odd = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if odd:
        raise ValueError(f"its attention takes {odd[0]}")
    tokens, width, groups = query.shape[2], query.shape[3], key.shape[1]
    share = query.shape[1] // groups
    scale = width**-0.5 if scaling is None else scaling
    # Axes are joined and parted by flatten and unflatten: torch.export cannot prove that other forms hold for any S.
    queries = (query.flatten(0, 1) * scale).contiguous().unflatten(0, (groups, share)).flatten(1, 2)  # (G, H/G · S, D)
    scores = torch.bmm(queries, key.flatten(0, 1).transpose(1, 2))  # (G, H/G · S, L)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.unflatten(1, (share, tokens)).flatten(0, 1)  # (H, S, L)
    if attention_mask is not None:
        scores = scores + attention_mask.flatten(0, 1)
    weights = torch.softmax(scores, dim=-1).unflatten(0, (groups, share)).flatten(1, 2)
    found = torch.bmm(weights, value.flatten(0, 1)).unflatten(1, (share, tokens)).flatten(0, 1)  # (H, S, D)
    return found.transpose(0, 1).unsqueeze(0), None
