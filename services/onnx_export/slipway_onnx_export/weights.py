"""Stream weights into ONNX external data, one slice of one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError

DATA_FILE = "model.onnx.data"

# Runtimes map external data into memory; a tensor that starts at a page boundary needs no copy.
PAGE = 4096
SMALL = 64
# Larger constants of the graph (rotary tables) go to the data file too, so that model.onnx stays small.
INLINE_BYTES = 1024
# Rows are converted in slices of about this size: the memory that streaming needs besides the page cache.
SLICE_BYTES = 32 << 20

OnTensor = Callable[[int, int], None]


def stream_weights(
    model: ir.Model,
    weights: Mapping[str, torch.Tensor],
    *,
    folder: Path,
    on_tensor: OnTensor = lambda _done, _total: None,
) -> int:
    """Write every weight as float32 to the folder's data file and bind the initializers to it, in place.

    Args:
        model: Graph whose initializers without a value are named in ``weights``.
        weights: Tensors by initializer name; float32, bfloat16 or float16, any strides.
        folder: Folder of the future ``model.onnx``.
        on_tensor: Called after each tensor with the bytes written so far and their total.

    Returns:
        Size of the data file in bytes.

    Raises:
        ONNXExportError: ``NON_FINITE_WEIGHTS``.
    """
    initializers = model.graph.initializers
    constants = {
        name: value.const_value
        for name, value in initializers.items()
        if name not in weights and value.const_value is not None and value.const_value.nbytes > INLINE_BYTES
    }
    total = sum(4 * tensor.numel() for tensor in weights.values()) + sum(c.nbytes for c in constants.values())
    done = 0
    with (folder / DATA_FILE).open("wb") as file:
        for name in list(initializers):
            if name in weights:
                offset, length = _write_tensor(file, weights[name], name=name)
                dtype = ir.DataType.FLOAT
            elif name in constants:
                offset, length = _write_bytes(file, constants[name].tobytes())
                dtype = constants[name].dtype
            else:
                continue
            _bind(initializers[name], dtype, offset=offset, length=length, folder=folder)
            done += length
            on_tensor(done, total)
        return file.tell()


def _bind(value: ir.Value, dtype: ir.DataType, *, offset: int, length: int, folder: Path) -> None:
    assert value.shape is not None
    assert value.name is not None
    value.type = ir.TensorType(dtype)
    value.const_value = ir.ExternalTensor(
        DATA_FILE, offset, length, dtype, shape=value.shape, name=value.name, base_dir=str(folder)
    )


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
