"""Give every linear layer of a model the same form."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


def use_linear_layers(model: Any) -> None:
    """Replace GPT-2's layers, which store (in, out), by linear ones, which store (out, in)."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                setattr(parent, name, _as_linear(layer))


def _as_linear(layer: Any) -> torch.nn.Linear:
    given, made = layer.weight.shape
    linear = torch.nn.Linear(given, made, device="meta")
    linear.weight = torch.nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear
