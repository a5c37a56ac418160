"""Put functions that can be traced in the place of those of transformers that cannot, while a model is traced.

Rotary embeddings that transformers computes with complex numbers, which ONNX does not have, become what they are: turns of pairs.

Axes: B = batch, T = tokens, H = heads, D = size of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from slipway_onnx_export.forms.recurrence import RECURRENCES

_ROTATE = "apply_rotary_emb"
_COMPLEX: Mapping[str, int] = {"llama4": 2, "deepseek_v2": 1}
"""The axis of heads in queries and keys, by the package in transformers whose ``apply_rotary_emb`` multiplies complex numbers."""


@contextmanager
def traceable(model: Any) -> Iterator[None]:
    """Replace functions in the modules of a model's classes while the block runs; other models must not run meanwhile."""
    sources = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as stack:
        for source in sources:
            for name, function in _replacements(source).items():
                stack.callback(partial(setattr, source, name, getattr(source, name)))
                setattr(source, name, function)
        for module in model.modules():
            if _axis(sys.modules[type(module).__module__]) and type(module).__name__.endswith("RotaryEmbedding"):
                stack.callback(_use_real_angles(module))
        yield


def _replacements(source: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions for a module of transformers, by name."""
    recurrences = {name: function for name, function in RECURRENCES.items() if hasattr(source, name)}
    axis = _axis(source)
    return {**recurrences, _ROTATE: _turning(axis)} if axis else recurrences


def _axis(source: ModuleType) -> int:
    """Return the axis of heads where a module multiplies complex numbers; 0 for any other."""
    return _COMPLEX.get(str(source.__package__).rpartition(".")[2], 0) if hasattr(source, _ROTATE) else 0


def _use_real_angles(rotary: Any) -> Callable[[], None]:
    """Make a rotary embedding return cosines and sines instead of complex numbers; return what undoes it."""
    rotary.forward = partial(_angles, rotary)
    return partial(delattr, rotary, "forward")


def _turning(axis: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return ``apply_rotary_emb`` for cosines and sines; ``axis`` is that of heads."""

    def turn(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = freqs_cis.unsqueeze(axis).unbind(-1)
        return _turn(xq, cosines, sines), _turn(xk, cosines, sines)

    return turn


def _angles(rotary: Any, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return cosine and sine of each pair's angle, (B, T, D / 2, 2). position_ids: (B, T)."""
    del x
    angles = position_ids[..., None].float() * rotary.inv_freq.float()
    return torch.stack((angles.cos(), angles.sin()), dim=-1) * rotary.attention_scaling


def _turn(values: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring values as pairs. values: (…, D); cosines and sines fit their pairs."""
    first, second = values.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
    return turned.flatten(-2).type_as(values)
