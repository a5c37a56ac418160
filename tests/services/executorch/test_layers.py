"""Layers that XNNPACK would compute as something else are replaced, or refused where they cannot be."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from slipway_executorch.lowering import check_gelus, replace_layers


class Hidden(torch.nn.Module):
    """A GELU that is no module."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return gelu(values, approximate=self.approximate)


def test_replaced_layers_compute_the_same() -> None:
    model = torch.nn.Sequential(Conv1D(4, 6), ACT2FN["gelu_pytorch_tanh"], torch.nn.GELU(approximate="tanh"))
    values = torch.linspace(-6, 6, 60).reshape(10, 6)
    wanted = model(values)
    replace_layers(model)
    assert isinstance(model[0], torch.nn.Linear)
    assert not any(isinstance(layer, torch.nn.GELU) for layer in model)
    torch.testing.assert_close(model(values), wanted, rtol=0, atol=1e-6)
    check_gelus(torch.export.export(model, (values,)).graph_module)


def test_a_gelu_within_code_is_refused_if_it_is_not_the_exact_one() -> None:
    values = torch.zeros(2)
    check_gelus(torch.export.export(Hidden("none"), (values,)).graph_module)
    with pytest.raises(ValueError, match="GELU by tanh within its code"):
        check_gelus(torch.export.export(Hidden("tanh"), (values,)).graph_module)
