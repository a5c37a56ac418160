"""Replace layers that XNNPACK cannot compute, or would compute as something else."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.activations import GELUTanh

from slipway.model.pytorch.linear_layers import use_linear_layers


class TanhGelu(torch.nn.Module):
    """GELU by its approximation with tanh, in operators of its own."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``. Source: GELU, arXiv 1606.08415, section 2."""
        inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values * values * values)
        return 0.5 * values * (1 + torch.tanh(inner))


def replace_layers(model: Any) -> None:
    """Replace GELUs by tanh, and GPT-2's layers by linear ones: only those are rounded and fused."""
    use_linear_layers(model)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, GELUTanh) or (isinstance(layer, torch.nn.GELU) and layer.approximate == "tanh"):
                setattr(parent, name, TanhGelu())


def check_gelus(graph: torch.fx.GraphModule) -> None:
    """Refuse a GELU by tanh that is left: ExecuTorch 1.5 gives it to XNNPACK as the exact one, without a word.

    Raises:
        ValueError: There is one.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.gelu.default and node.kwargs.get("approximate", "none") != "none":
            raise ValueError("it computes GELU by tanh within its code, which XNNPACK would compute as the exact one")
