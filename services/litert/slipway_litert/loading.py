"""Load a merged model in float32, in the form that is traced: with attention in few products of fixed shapes.

Keys and values are not copied for each head of queries that shares them.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slipway.errors import LiteRtExportError
from slipway.model.generation import token_of
from slipway.model.pytorch.own_attention import use_attention
from slipway.model.pytorch.text_model import TextModel, open_text_model
from slipway_litert.params import PRODUCT

NAME = "slipway_litert"


def open_source(folder: Path) -> TextModel:
    """Load the model of a folder.

    Raises:
        LiteRtExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="LiteRT", error=LiteRtExportError
    )
    use_attention(source.model, NAME, attend)
    return source


def padding_of(source: TextModel) -> int:
    """Return the padding token; 0 if the model has none."""
    return token_of(source.model.config, "pad_token_id") or 0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend to masked places. query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L); result: (1, S, H, D)."""
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
    return result.transpose(1, 2)
