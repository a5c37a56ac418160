"""Limit the memory that peft takes to build a form: peft trusts the numbers of ``adapter_config.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipway.errors import ModelMergeError
from slipway.sizes import format_size

#: Bytes that any form may take.
_ALWAYS = 64 << 20
#: Multiples of the square of a layer's inputs, or of its size: BOFT has some permutations of the inputs for each of its factors.
_OF_LARGEST = 16
#: Multiples of the sizes of all layers together: FRoD takes two.
_OF_ALL = 3
_BYTES = 4


def most_bytes(layers: Iterable[nn.Module]) -> int:
    """Return the most bytes of float32 tensors that a form may make on these layers: in proportion to them, and more than any form needs."""
    shapes = [[parameter.shape for parameter in layer.parameters()] for layer in layers]
    sizes = [sum(shape.numel() for shape in each) for each in shapes]
    inputs = [shape[1:].numel() for each in shapes for shape in each]
    largest = max(*sizes, *(count * count for count in inputs), 0, 0)
    return _ALWAYS + _BYTES * (_OF_LARGEST * largest + _OF_ALL * sum(sizes))


class Bounded(TorchDispatchMode):
    """Limit the total bytes of the tensors made in a block. Tensors on ``meta`` take none.

    Only tensors made from numbers count: the sizes of all others follow from these, the base and the adapter's own tensors.

    Raises:
        ModelMergeError: ``ADAPTER_CONFIG_INVALID``, before the tensor is made.
    """

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self._taken = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, unless it would exceed the limit."""
        options = dict(kwargs or {})
        if self._taken <= self._most:
            self._taken += _new_bytes(function, args, options)
        if self._taken > self._most:
            raise ModelMergeError(
                f"adapter_config.json asks for more than {format_size(self._most)} of memory to build the adapter, which is more "
                "than any adapter takes on layers of this base",
                reason="ADAPTER_CONFIG_INVALID",
                remedy="use the adapter_config.json that was saved with these weights",
                about={"memory_bytes": self._taken},
            )
        return function(*args, **options)


def _new_bytes(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the bytes of a tensor that an operation is about to make from numbers; 0 for every other operation."""
    device = options.get("device")
    if device is None or device.type == "meta" or any(isinstance(value, torch.Tensor) for value in args):
        return 0
    elsewhere = {"device": torch.device("meta"), "pin_memory": False}
    planned = function(*args, **{**options, **elsewhere, **({"generator": None} if "generator" in options else {})})
    return planned.nbytes if isinstance(planned, torch.Tensor) else 0
