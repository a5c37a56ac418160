"""Find the places of weights in the model's tensors, by their addresses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import torch

from slipway.model.weights.left_out import LeftOut
from slipway_onnx_export.loading.conversion import Stack, Weight


class WeightsNeededError(Exception):
    """A graph needs values that its source makes only when they are read. The message says which."""


class Places:
    """Finds out what part of the model a weight of a graph is.

    Args:
        tensors: The model's tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
        self._starts, self._names = [start for start, _ in found], [name for _, name in found]
        self._tensors = tensors

    def owner(self, weight: torch.Tensor) -> str | None:
        """Return the name of the tensor in whose memory a weight begins; None if it was computed."""
        index = bisect_right(self._starts, weight.data_ptr()) - 1
        if index < 0:
            return None
        tensor = self._tensors[self._names[index]]
        return self._names[index] if weight.data_ptr() < tensor.data_ptr() + tensor.nbytes else None

    def matrix(self, weight: Weight) -> LeftOut | None:
        """Return the rows of a tensor that a weight is, as they are or transposed; None if it is anything else."""
        if isinstance(weight, Stack) or weight.dim() != 2 or not weight.numel():
            return None
        name = self.owner(weight)
        if name is None:
            return None
        tensor, transposed = self._tensors[name], not weight.is_contiguous()
        rows = weight.t() if transposed else weight
        offset, rest = divmod(rows.data_ptr() - tensor.data_ptr(), tensor.element_size() * rows.shape[1])
        same = tensor.dim() == 2 and tensor.dtype == rows.dtype and tensor.shape[1:] == rows.shape[1:]
        if not (same and rows.is_contiguous() and tensor.is_contiguous()) or rest:
            return None
        return LeftOut(tensor=name, first=offset, rows=len(rows), transposed=transposed)
