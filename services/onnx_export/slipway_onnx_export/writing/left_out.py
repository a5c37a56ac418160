"""Leave matrices out of graphs: the quantize stage reads them from the model, so that no float32 copy of them is written.

A weight's place in the model's tensors is found by its address.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from slipway.model.graphs.weights import LeftOut
from slipway.model.weights.reading import Weights, row_pieces
from slipway_onnx_export.loading.conversion import Stack, Weight
from slipway_onnx_export.names import INLINE_BYTES
from slipway_onnx_export.source import ModelSource

Graph = tuple[str, ir.Model, dict[str, Weight]]


def leave_out(graphs: Sequence[Graph], source: ModelSource) -> dict[str, dict[str, LeftOut]]:
    """Turn the graphs' matrices into inputs and remove them from the weights to write, in place; return them by file.

    Raises:
        WeightsNeededError: The source makes its weights when they are read, and a weight to write needs their values.
    """
    places = Places(source.weights)
    result: dict[str, dict[str, LeftOut]] = {}
    for file, _, weights in graphs:
        matrices = {
            name: places.matrix(weight) for name, weight in weights.items() if weight.numel() * 4 > INLINE_BYTES
        }
        result[file] = {name: place for name, place in matrices.items() if place is not None}
        _require_values({name: weight for name, weight in weights.items() if name not in result[file]}, places, source)
    with source.open() as values:
        _share_tables(graphs, result, values)
    for file, model, weights in graphs:
        order = {name: index for index, name in enumerate(model.graph.initializers)}
        for name, place in result[file].items():
            result[file][name] = place.model_copy(update={"index": order[name]})
            value = model.graph.initializers.pop(name)
            value.type = ir.TensorType(ir.DataType.FLOAT)
            model.graph.inputs.append(value)
            del weights[name]
    return result


def _require_values(weights: Mapping[str, Weight], places: Places, source: ModelSource) -> None:
    """Refuse weights that are computed, or parts of a stand-in, if the source has stand-ins."""
    if not source.stand_ins:
        return
    for name, weight in weights.items():
        parts = [part for parts in weight.parts for part in parts] if isinstance(weight, Stack) else [weight]
        owners = {places.owner(part) for part in parts if part.numel()}
        if None in owners or owners & source.stand_ins:
            raise WeightsNeededError(f"{name!r} is computed from the model's weights")


def _share_tables(graphs: Sequence[Graph], left_out: dict[str, dict[str, LeftOut]], values: Weights) -> None:
    """Give an embedding and a matrix with the same values one place: a tied weight that the model stores twice."""
    tables = {
        left_out[file][name]
        for file, model, _ in graphs
        for name in left_out[file]
        if any(use.node.op_type == "Gather" for use in model.graph.initializers[name].uses())
    }
    kept: dict[LeftOut, LeftOut] = {}
    for table in sorted(tables, key=lambda place: (place.tensor, place.first)):
        for names in left_out.values():
            for name, place in names.items():
                natural = place.model_copy(update={"transposed": False})
                if natural != table and natural not in kept and _are_equal(table, natural, values):
                    kept[natural] = table
                if natural in kept:
                    names[name] = kept[natural].model_copy(update={"transposed": place.transposed})


def _are_equal(first: LeftOut, second: LeftOut, values: Weights) -> bool:
    one, other = values.tensors[first.tensor], values.tensors[second.tensor]
    if (first.rows, one.shape[1:], one.dtype) != (second.rows, other.shape[1:], other.dtype):
        return False
    for start, count in row_pieces(one):
        size = min(count, first.rows - start)
        if size <= 0:
            break
        pieces = [values.rows(part.tensor, part.first + start, size) for part in (first, second)]
        if not np.array_equal(pieces[0], pieces[1]):
            return False
    return True


class WeightsNeededError(Exception):
    """A graph needs values that its source makes only when they are read. The message says which."""


class Places:
    """Finds the part of the model that a weight of a graph is.

    Args:
        tensors: The model's tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        starts = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
        self._starts, self._names = [start for start, _ in starts], [name for _, name in starts]
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
