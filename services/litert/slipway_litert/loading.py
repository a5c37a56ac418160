"""Load a merged model in float32, in the form that is traced: with attention in few products of fixed shapes.

Keys and values are not copied for each head of queries that shares them.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from slipway.errors import LiteRtExportError
from slipway.model.generation import token_of
from slipway.model.pytorch.text_model import TextModel, open_text_model
from slipway_litert.params import PRODUCT

NAME = "slipway_litert"
_ANSWERED = ("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions")
"""Arguments that are already in the mask or the cache."""


def open_source(folder: Path) -> TextModel:
    """Load the model of a folder.

    Raises:
        LiteRtExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="LiteRT", error=LiteRtExportError
    )
    use_grouped_attention(source.model)
    return source


def padding_of(source: TextModel) -> int:
    """Return the padding token; 0 if the model has none."""
    return token_of(source.model.config, "pad_token_id") or 0


def use_grouped_attention(model: Any) -> None:
    """Make a model use :func:`attend`, unless its class computes attention itself."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


def use_own_attention(model: Any) -> None:
    """Make a model use transformers' own attention again."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


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
    """Attend to masked places. query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L); result: (1, S, H, D).

    Raises:
        ValueError: The model needs more than masked, scaled and capped products.
    """
    odd = sorted(name for name, given in others.items() if given is not None and name not in _ANSWERED)
    if odd:
        raise ValueError(f"its attention takes {odd[0]}")
    (_, heads, tokens, width), (_, groups, places, _) = query.shape, key.shape
    scale = width**-0.5 if scaling is None else scaling
    shared = (query * scale).reshape(1, groups, -1, width)  # (1, G, H/G · S, D)
    scores = (shared @ key.transpose(2, 3)).reshape(1, heads, tokens, places)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1).reshape(1, groups, -1, places)
    result = (weights @ value).reshape(1, heads, tokens, value.shape[3])
    return result.transpose(1, 2), None
