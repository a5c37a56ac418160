"""Load a merged model in float32, in the form that is traced: with attention and layers that XNNPACK can compute.

Attention is matrix products of keys and values as they are stored, and a mask that is added.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers.activations import GELUTanh

from slipway.errors import ExecutorchExportError
from slipway.model.pytorch.own_attention import use_attention
from slipway.model.pytorch.text_model import TextModel, open_text_model, use_linear_layers
from slipway_executorch.params import PRODUCT

NAME = "slipway_grouped"


def open_source(folder: Path) -> TextModel:
    """Load the model of a folder, with attention and layers that XNNPACK can compute.

    Raises:
        ExecutorchExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="ExecuTorch", error=ExecutorchExportError
    )
    use_attention(source.model, NAME, attend)
    replace_layers(source.model)
    return source


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend without copying keys and values for each head of queries that shares them.

    query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L), added; result (1, S, H, D).
    """
    tokens, width, groups = query.shape[2], query.shape[3], key.shape[1]
    share = query.shape[1] // groups
    scale = width**-0.5 if scaling is None else scaling
    # Only flatten and unflatten here: torch.export cannot prove that other reshapes hold for any S.
    queries = (query.flatten(0, 1) * scale).contiguous().unflatten(0, (groups, share)).flatten(1, 2)  # (G, H/G · S, D)
    scores = torch.bmm(queries, key.flatten(0, 1).transpose(1, 2))  # (G, H/G · S, L)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.unflatten(1, (share, tokens)).flatten(0, 1)  # (H, S, L)
    if attention_mask is not None:
        scores = scores + attention_mask.flatten(0, 1)
    weights = torch.softmax(scores, dim=-1).unflatten(0, (groups, share)).flatten(1, 2)
    result = torch.bmm(weights, value.flatten(0, 1)).unflatten(1, (share, tokens)).flatten(0, 1)  # (H, S, D)
    return result.transpose(0, 1).unsqueeze(0)


class TanhGelu(torch.nn.Module):
    """GELU's tanh approximation, in separate operators."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``. Source: GELU, arXiv 1606.08415, section 2."""
        inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values * values * values)
        return 0.5 * values * (1 + torch.tanh(inner))


def replace_layers(model: Any) -> None:
    """Replace GELUs that use tanh by :class:`TanhGelu`, and GPT-2's layers by linear ones, which alone are rounded and fused."""
    use_linear_layers(model)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, GELUTanh) or (isinstance(layer, torch.nn.GELU) and layer.approximate == "tanh"):
                setattr(parent, name, TanhGelu())


def check_gelus(graph: torch.fx.GraphModule) -> None:
    """Refuse a graph that still has a tanh GELU: ExecuTorch 1.5 silently gives it to XNNPACK as an exact GELU.

    Raises:
        ValueError: The graph has one.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.gelu.default and node.kwargs.get("approximate", "none") != "none":
            raise ValueError("it computes GELU by tanh within its code, which XNNPACK would compute as the exact one")
