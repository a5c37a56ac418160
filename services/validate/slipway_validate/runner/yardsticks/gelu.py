"""Compute a model's exact GELUs by the approximation that an export was asked for: it is part of what its graph promises to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from transformers.activations import GELUActivation


@contextmanager
def approximated_gelu(model: nn.Module) -> Iterator[None]:
    """Let the GELUs of a model compute what ``FastGelu`` does, within the block."""
    ours = [each for each in model.modules() if isinstance(each, GELUActivation)]
    plain = [each for each in model.modules() if isinstance(each, nn.GELU) and each.approximate == "none"]
    before = [each.act for each in ours]
    try:
        for activation in ours:
            activation.act = partial(nn.functional.gelu, approximate="tanh")
        for layer in plain:
            layer.approximate = "tanh"
        yield
    finally:
        for activation, act in zip(ours, before, strict=True):
            activation.act = act
        for layer in plain:
            layer.approximate = "none"
