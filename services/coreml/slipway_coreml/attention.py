"""Attention as Core ML can compute it: its own operator for it, and a mask that is added and fits in half precision.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "slipway_coreml"
LOWEST = -3e4
"""What hides a key: its weight is zero, and a score added to it stays within half precision."""
_HARMLESS = (
    "is_causal",
    "sliding_window",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "deterministic",
    "token_type_ids",
)
"""Arguments that the mask or the cache has already answered, or that no attention reads."""


def use_core_attention(model: Any) -> None:
    """Let a model attend by :func:`attend`, unless its class computes attention in its own way."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, added_mask)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


def added_mask(
    batch_size: int,  # noqa: ARG001 - a call has one row
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """Return a mask to add to scores, (1, 1, S, L), or (1, 1, 1, L) if all tokens see the same keys."""
    places, keys = torch.arange(q_length) + q_offset, torch.arange(kv_length) + kv_offset
    seen = mask_function(0, 0, places[:, None], keys[None])
    if attention_mask is not None:
        seen = seen & attention_mask.bool()
    return (1 - seen.to(dtype))[None, None] * LOWEST


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
    """Attend. query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L), added; result (1, S, H, D).

    Raises:
        ValueError: The model asks for something else than masked, scaled and capped products.
    """
    odd = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if odd:
        raise ValueError(f"its attention takes {odd[0]}")
    share = query.shape[1] // key.shape[1]
    if share > 1:
        # As one copy; coremltools makes four of repeat_interleave.
        key, value = (
            each[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2) for each in (key, value)
        )  # (1, H, L, D)
    usual = query.shape[3] ** -0.5
    scale = usual if scaling is None else scaling
    if softcap is None:
        # Without a scale, coremltools takes Core ML's operator.
        query = query if scale == usual else query * (scale / usual)
        found = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
    else:
        scores = torch.tanh(query @ key.transpose(2, 3) * (scale / softcap)) * softcap  # (1, H, S, L)
        if attention_mask is not None:
            scores = scores + attention_mask
        found = torch.softmax(scores, dim=-1) @ value
    return found.transpose(1, 2), None
