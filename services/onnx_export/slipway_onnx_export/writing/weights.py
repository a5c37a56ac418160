"""Stream weights into ONNX external data, one slice of one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError
from slipway.model.graphs.inline import take_weights_in
from slipway_onnx_export.loading.conversion import Stack, Weight, place_of
from slipway_onnx_export.writing.data_file import DataFile
from slipway_onnx_export.writing.sizes import INLINE_BYTES

DATA_SUFFIX = ".data"

OnTensor = Callable[[int, int], None]


Graph = tuple[str, ir.Model, Mapping[str, Weight]]
"""File name of a graph, the graph, and the tensors of its initializers without a value."""


def stream_weights(
    graphs: Sequence[Graph], *, folder: Path, threads: int = 1, on_tensor: OnTensor = lambda _done, _total: None
) -> int:
    """Write every weight as float32 to the data file of its graph and bind the initializers to it, in place.

    A weight of several graphs is written once, beside the first of them. Tensors are float32, bfloat16 or float16, of any strides.

    Args:
        graphs: The graphs of a model.
        folder: Folder of the future ``.onnx`` files.
        threads: Threads that convert and write.
        on_tensor: Called for each tensor with the bytes of all up to it and their total.

    Returns:
        Size of the data files in bytes.

    Raises:
        ONNXExportError: ``NON_FINITE_WEIGHTS``.
    """
    stored = _Stored(graphs)
    placed: dict[tuple[object, ...], tuple[str, int, int]] = {}
    done = 0
    for file_name, model, weights in graphs:
        constants = dict(_constants(model, weights))
        data_file = file_name + DATA_SUFFIX
        with DataFile(folder / data_file, threads=threads) as file:
            for name, value in model.graph.initializers.items():
                length = 0
                if name in weights:
                    key, dtype = stored.key(weights[name]), ir.DataType.FLOAT
                    if key not in placed:
                        offset, length = file.write_tensor(weights[name], name=name)
                        placed[key] = data_file, offset, length
                elif name in constants:
                    key, dtype = stored.key(constants[name]), constants[name].dtype
                    if key not in placed:
                        offset, length = file.write_bytes(constants[name].tobytes())
                        placed[key] = data_file, offset, length
                else:
                    continue
                _bind(value, dtype, place=placed[key], folder=folder)
                done += length
                on_tensor(done, stored.nbytes)
    return sum((folder / (file_name + DATA_SUFFIX)).stat().st_size for file_name, _, _ in graphs)


class _Stored:
    """The distinct weights and constants of some graphs.

    Weights are equal if they are the same numbers of a file, or equal numbers of two places: a tied weight may be stored twice.
    """

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.nbytes = 0
        self._keys: dict[tuple[object, ...], tuple[object, ...]] = {}
        self._distinct: set[tuple[object, ...]] = set()
        self._alike: dict[tuple[object, ...], list[torch.Tensor]] = {}
        for _, model, weights in graphs:
            for weight in weights.values():
                self._add(place_of(weight), self._equal(weight), 4 * weight.numel())
            for _, constant in _constants(model, weights):
                self._add(("constant", id(constant)), self._equal_constant(constant), constant.nbytes)

    def key(self, stored: Weight | ir.TensorProtocol) -> tuple[object, ...]:
        """Return a key that equal ones share."""
        if isinstance(stored, torch.Tensor | Stack):
            return self._keys[place_of(stored)]
        return self._keys["constant", id(stored)]

    def _add(self, place: tuple[object, ...], key: tuple[object, ...], nbytes: int) -> None:
        self._keys[place] = key
        if key not in self._distinct:
            self._distinct.add(key)
            self.nbytes += nbytes

    def _equal(self, weight: Weight) -> tuple[object, ...]:
        """Return the place of an equal weight before it, otherwise its own. Only weights with equal corners are read."""
        if isinstance(weight, Stack) or weight.numel() * 4 <= INLINE_BYTES:
            return place_of(weight)
        first, last = (tuple(slice(*ends) for _ in weight.shape) for ends in ((0, 4), (-4, None)))
        corners = torch.cat([weight[first].flatten(), weight[last].flatten()]).tolist()
        alike = self._alike.setdefault((weight.dtype, tuple(weight.shape), *corners), [])
        for other in alike:
            if torch.equal(weight, other):
                return place_of(other)
        alike.append(weight)
        return place_of(weight)

    def _equal_constant(self, constant: ir.TensorProtocol) -> tuple[object, ...]:
        array = constant.numpy()
        if array.dtype in (np.float32, np.int64, np.bool_):
            return self._equal(torch.from_numpy(np.array(array)))
        return "constant", id(constant)


def take_data_in(graphs: Sequence[tuple[str, ir.Model]], *, folder: Path) -> None:
    """Move the weights from the data files into the graphs, in memory, and delete the files.

    Raises:
        ONNXExportError: ``ONNX_TOO_LARGE`` if a graph would exceed the 2 GB that a protobuf file can have.
    """
    for file_name, model in graphs:
        take_weights_in(model, file_name, error=ONNXExportError)
    for file_name, _ in graphs:
        (folder / (file_name + DATA_SUFFIX)).unlink()


def _constants(model: ir.Model, weights: Mapping[str, Weight]) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """Yield the graph's own constants that are too large to stand in it."""
    for name, value in model.graph.initializers.items():
        if name not in weights and value.const_value is not None and value.const_value.nbytes > INLINE_BYTES:
            yield name, value.const_value


def _bind(value: ir.Value, dtype: ir.DataType, *, place: tuple[str, int, int], folder: Path) -> None:
    """Make a place in a data file the value of an initializer: file name, offset, length."""
    assert value.shape is not None
    assert value.name is not None
    value.type = ir.TensorType(dtype)
    value.const_value = ir.ExternalTensor(*place, dtype, shape=value.shape, name=value.name, base_dir=str(folder))
