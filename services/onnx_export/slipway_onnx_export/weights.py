"""Stream weights into ONNX external data, one slice of one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError
from slipway.sizes import format_size

DATA_SUFFIX = ".data"

# Runtimes map external data into memory; a tensor that starts at a page boundary needs no copy.
PAGE = 4096
SMALL = 64
# Larger constants of the graph (rotary tables) go to the data file too, so that model.onnx stays small.
INLINE_BYTES = 1024
# Rows are converted in slices of about this size: the memory that streaming needs besides the page cache.
SLICE_BYTES = 32 << 20
# protobuf's limit of 2 GiB, less room for the graph itself
MOST_INLINE_BYTES = (2 << 30) - (64 << 20)

OnTensor = Callable[[int, int], None]


Graph = tuple[str, ir.Model, Mapping[str, torch.Tensor]]
"""File name of a graph, the graph, and the tensors of its initializers without a value."""


def stream_weights(graphs: Sequence[Graph], *, folder: Path, on_tensor: OnTensor = lambda _done, _total: None) -> int:
    """Write every weight as float32 to the data file of its graph and bind the initializers to it, in place.

    A weight of several graphs is written once, beside the first of them. Tensors are float32, bfloat16 or float16, of any strides.

    Args:
        graphs: The graphs of a model.
        folder: Folder of the future ``.onnx`` files.
        on_tensor: Called after each tensor with the bytes written so far and their total.

    Returns:
        Size of the data files in bytes.

    Raises:
        ONNXExportError: ``NON_FINITE_WEIGHTS``.
    """
    placed: dict[_View, tuple[str, int, int]] = {}
    tensors = {_view(tensor): tensor for _, _, weights in graphs for tensor in weights.values()}
    total = sum(4 * tensor.numel() for tensor in tensors.values())
    total += sum(constant.nbytes for _, model, weights in graphs for _, constant in _constants(model, weights))
    done = 0

    for file_name, model, weights in graphs:
        constants = dict(_constants(model, weights))
        data_file = file_name + DATA_SUFFIX
        with (folder / data_file).open("wb") as file:
            for name, value in model.graph.initializers.items():
                length = 0
                if name in weights:
                    view, dtype = _view(weights[name]), ir.DataType.FLOAT
                    if view not in placed:
                        offset, length = _write_tensor(file, weights[name], name=name)
                        placed[view] = data_file, offset, length
                    place = placed[view]
                elif name in constants:
                    offset, length = _write_bytes(file, constants[name].tobytes())
                    place, dtype = (data_file, offset, length), constants[name].dtype
                else:
                    continue
                _bind(value, dtype, place=place, folder=folder)
                done += length
                on_tensor(done, total)
    return sum((folder / (file_name + DATA_SUFFIX)).stat().st_size for file_name, _, _ in graphs)


def take_weights_in(graphs: Sequence[tuple[str, ir.Model]], *, folder: Path) -> None:
    """Move the weights from the data files into the graphs, in memory, and delete the files.

    Raises:
        ONNXExportError: ``ONNX_TOO_LARGE`` if a graph would exceed the 2 GB that a protobuf file can have.
    """
    for file_name, model in graphs:
        size = sum(
            value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None
        )
        if size > MOST_INLINE_BYTES:
            raise ONNXExportError(
                f"{file_name} has {format_size(size)} of weights, and a graph can hold {format_size(MOST_INLINE_BYTES)}",
                reason="ONNX_TOO_LARGE",
                remedy="set external_data to true",
                about={"file": file_name, "size_bytes": size},
            )
        ir.external_data.load_to_model(model)
    for file_name, _ in graphs:
        (folder / (file_name + DATA_SUFFIX)).unlink()


_View = tuple[int, tuple[int, ...], tuple[int, ...]]


def _view(tensor: torch.Tensor) -> _View:
    """Return what two tensors share if they are the same numbers in the same order: place, shape and strides."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _constants(model: ir.Model, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, ir.TensorProtocol]]:
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


def _align(file: BinaryIO, length: int) -> int:
    offset = file.tell()
    padding = -offset % (PAGE if length >= PAGE else SMALL)
    file.write(b"\0" * padding)
    return offset + padding


def _write_bytes(file: BinaryIO, data: bytes) -> tuple[int, int]:
    offset = _align(file, len(data))
    file.write(data)
    return offset, len(data)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor, *, name: str) -> tuple[int, int]:
    """Append one tensor as contiguous float32. tensor: (rows, …)."""
    length = 4 * tensor.numel()
    offset = _align(file, length)
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, SLICE_BYTES * len(rows) // max(length, 1))
    for start in range(0, len(rows), step):
        block = rows[start : start + step].to(torch.float32).contiguous().numpy()
        if not np.isfinite(block).all():
            raise ONNXExportError(
                f"weight {name!r} contains NaN or infinity",
                reason="NON_FINITE_WEIGHTS",
                remedy="check the checkpoint: training may have diverged",
                about={"tensor": name},
            )
        file.write(block.data)
    return offset, length
