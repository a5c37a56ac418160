"""Compute a PyTorch model in float32 while its large weights stay as they are stored: in 16 bits, mapped from their file.

Widening a 16-bit float is exact, so the results are those of a model that was converted as a whole. But only a piece of one weight exists
in float32 at a time, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SMALLEST_VALUES = 1 << 16
"""Smaller weights are converted once."""
PIECE_VALUES = 1 << 19
"""Values that are widened at a time: 2 MiB, which a core's own cache about holds. A decode step takes a third of what it takes with 16 MiB."""
_SHORT = (torch.bfloat16, torch.float16)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in float32 by oneDNN, which uses the vector units of all makers: on AMD, MKL takes twice the time."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return found


_PRODUCT = _product if torch.backends.mkldnn.is_available() else nn.functional.linear


class _Scratch:
    """Memory for the piece of a weight that is used now; one for all layers, because one layer computes at a time."""

    def __init__(self) -> None:
        self._values = torch.empty(0)

    def widen(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a piece of a weight in float32, until the next call."""
        if self._values.numel() < piece.numel():
            self._values = torch.empty(max(piece.numel(), PIECE_VALUES))
        return self._values[: piece.numel()].view(piece.shape).copy_(piece)


_SCRATCH = _Scratch()


class WideLinear(nn.Linear):
    """A linear layer whose weight is widened piece by piece; ``weight`` is all of it in float32, for code that asks for it."""

    stored: torch.Tensor

    @property
    def weight(self) -> Any:  # type: ignore[override] # a parameter of nn.Linear
        """Return the weight in float32. (out, in)."""
        return self.stored.float()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of nn.Linear
        """Return the results of all rows. (…, in) -> (…, out)."""
        stored, flat = self.stored, input.reshape(-1, self.in_features)
        step = max(1, PIECE_VALUES // self.in_features)
        results = flat.new_empty(len(flat), self.out_features)
        for start in range(0, self.out_features, step):
            part = slice(start, start + step)
            results[:, part] = _PRODUCT(flat, _SCRATCH.widen(stored[part]))
        if self.bias is not None:
            results += self.bias
        return results.view(*input.shape[:-1], self.out_features)


class WideEmbedding(nn.Embedding):
    """An embedding of which only the rows of a call are widened."""

    stored: torch.Tensor

    @property
    def weight(self) -> Any:  # type: ignore[override] # as above
        """Return the weight in float32. (rows, width)."""
        return self.stored.float()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of nn.Embedding
        """Return the rows. (…) -> (…, width)."""
        return self.stored[input].float()


_WIDE: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: WideLinear, nn.Embedding: WideEmbedding}


def widen_while_computing(model: nn.Module) -> Callable[[], None]:
    """Let all large 16-bit weights of plain layers be widened where they are used; return a function that undoes this.

    Layers of other classes, and those whose computation something replaced, keep their parameters for the caller to convert.
    """
    undo = [_widen(layer) for layer in model.modules() if _is_plain(layer)]

    def restore() -> None:
        for each in undo:
            each()

    return restore


def _is_plain(layer: nn.Module) -> bool:
    kind = type(layer)
    if kind not in _WIDE or not (_has_own_function(layer) or _is_decompressed(layer)):
        return False
    if kind is nn.Embedding and getattr(layer, "max_norm", None) is not None:
        return False
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.dtype in _SHORT and weight.numel() >= SMALLEST_VALUES


def _has_own_function(layer: nn.Module) -> bool:
    """Return whether the layer computes what its class does; compressed-tensors may leave that function on the layer itself."""
    return "forward" not in layer.__dict__ or _function_of(layer) is type(layer).forward


def _is_decompressed(layer: nn.Module) -> bool:
    """Return whether compressed-tensors has decompressed the layer: its function calls that of the class, with the weight as it is.

    Around that it may round the inputs and results, if the level says so, and move the inputs to where the weight is.
    """
    inner = getattr(_function_of(layer), "__wrapped__", None)
    return inner is type(layer).forward and getattr(layer, "quantization_status", None) == "decompressed"


def _function_of(layer: nn.Module) -> Any:
    own = getattr(layer.__dict__.get("forward"), "__func__", None)
    return layer.__dict__.get("_original_forward_func", own)


def _rounds_activations(layer: nn.Module) -> bool:
    scheme = getattr(layer, "quantization_scheme", None)
    return bool(getattr(scheme, "input_activations", None) or getattr(scheme, "output_activations", None))


def _widen(layer: nn.Module) -> Callable[[], None]:
    kind, computes = type(layer), layer.__dict__.get("forward")
    weight = layer._parameters["weight"]
    del layer._parameters["weight"]
    layer.__dict__["stored"] = weight
    layer.__class__ = _WIDE[kind]
    if not _rounds_activations(layer):
        layer.__dict__.pop("forward", None)

    def restore() -> None:
        layer.__class__ = kind
        del layer.__dict__["stored"]
        layer._parameters["weight"] = weight
        if computes is not None:
            layer.__dict__["forward"] = computes

    return restore
