"""Round values as runtimes and levels do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BLOCKS = re.compile(r"int8/([1-9]\d{0,4})")
_GROUPS = re.compile(r"int(?P<bits>[2-8])/(?P<size>[1-9]\d{0,4})")
_LARGEST_FLOAT8 = 448.0
"""Largest value of float8 E4M3. Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022."""
_TINY = 1e-30
RESULTS = "results/"
_ROUNDED = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "matmul",
        "convolution",
        "embedding",
        "add",
        "mul",
        "native_layer_norm",
        "_softmax",
        "gelu",
        "silu",
        "relu",
        "tanh",
        "_scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_attention",
    ]
)
"""Operations whose results a graph in a 16-bit type stores: products, sums, norms, activations. Squares and means within a norm are not among
them, because graphs keep those in float32."""
Rounding = Callable[[Tensor], Tensor]


def input_rounding(name: str) -> Rounding:
    """Return the function that rounds the inputs of a product, float32 (…, K), as a runtime does (``Runtime.rounds``).

    Raises:
        LookupError: The name is unknown.
    """
    if match := _BLOCKS.fullmatch(name):
        size = int(match[1])
        return lambda values: _round_groups(values, size, top=127)
    return _INPUTS[name]


def weight_rounding(name: str) -> Rounding:
    """Return the function that rounds a weight, float32 (N, K): to a float type, or to ``intB/G``, B bits in groups of G, symmetric.

    Raises:
        LookupError: The name is unknown.
    """
    if match := _GROUPS.fullmatch(name):
        top, size = (1 << (int(match["bits"]) - 1)) - 1, int(match["size"])
        return lambda values: _round_groups(values, size, top=top)
    return _FLOATS[name]


def encoder_inputs(name: str) -> Rounding:
    """Return how inputs within parts for images and sound are rounded where those of the text are by ``name``: no level gives them less than 16 bits."""
    return _FLOATS.get(name, _FLOATS["float16"])


def encoder_weights(name: str) -> Rounding:
    """Return how weights of parts for images and sound are rounded where those of the text are by ``name``: levels below 16 bits leave them as they are."""
    return _FLOATS.get(name, _FLOATS["float32"])


class RoundedResults(TorchDispatchMode):
    """Round what operations compute to a type of 16 bits, as a graph in this type does; weights stay as they are.

    What exceeds the type becomes its largest value.

    Args:
        name: ``results/float16`` or ``results/bfloat16`` (``Runtime.rounds``).
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dtype = name.removeprefix(RESULTS)
        self._round = _FLOATS[dtype]
        self._most = torch.finfo(getattr(torch, dtype)).max

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _ROUNDED:
            return result
        first, *others = result if isinstance(result, tuple) else (result,)
        # One value for a row is a sum within a norm.
        if isinstance(first, Tensor) and first.dtype == torch.float32 and first.dim() and first.shape[-1] > 1:
            first = self._round(first.clamp(-self._most, self._most))
        return (first, *others) if isinstance(result, tuple) else first


def _round_groups(values: Tensor, size: int, *, top: int) -> Tensor:
    """Round to whole numbers of at most ``top`` that share a scale in groups of the last axis; the last group may be shorter."""
    columns = values.shape[-1]
    groups = torch.nn.functional.pad(values, (0, -columns % size)).unflatten(-1, (-1, size))
    return _round_scaled(groups, top).flatten(-2)[..., :columns]


def _round_scaled(values: Tensor, top: float) -> Tensor:
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(_TINY) / top
    return torch.round(values / scale) * scale


def _round_whole(values: Tensor) -> Tensor:
    """Round all values to 256 steps between the smallest and the largest, of which one is zero."""
    low, high = values.amin().clamp_max(0), values.amax().clamp_min(0)
    scale = (high - low).clamp_min(_TINY) / 255
    return torch.round(values / scale) * scale


def _round_float8(values: Tensor) -> Tensor:
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(_TINY) / _LARGEST_FLOAT8
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


_FLOATS: dict[str, Rounding] = {
    "float16": lambda values: values.half().float(),
    "bfloat16": lambda values: values.bfloat16().float(),
    "float32": lambda values: values,
}
_INPUTS: dict[str, Rounding] = {
    **_FLOATS,
    "int8/row": lambda values: _round_scaled(values, 127),
    "int8/tensor": _round_whole,
    "float8/row": _round_float8,
}
