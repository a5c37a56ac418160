"""Trace rotary embeddings that transformers computes with complex numbers, which ONNX does not have, as what they are: turns of pairs.

Axes: B = batch, T = tokens, H = heads, D = size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

COMPLEX: Mapping[str, int] = {"llama4": 2, "deepseek_v2": 1}
"""The axis of heads in queries and keys, by the package in transformers whose ``apply_rotary_emb`` multiplies complex numbers."""


def use_real_angles(rotary: Any) -> Callable[[], None]:
    """Make a rotary embedding return cosines and sines instead of complex numbers; return what undoes it."""
    rotary.forward = partial(_angles, rotary)
    return partial(delattr, rotary, "forward")


def turning(axis: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
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
