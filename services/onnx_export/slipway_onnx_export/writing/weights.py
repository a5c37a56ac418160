"""Stream weights into ONNX external data, one slice of one tensor at a time; several threads convert them to float32."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError
from slipway.model.graphs.weights import take_weights_in
from slipway_onnx_export.loading.conversion import Stack, Weight, place_of
from slipway_onnx_export.names import INLINE_BYTES

DATA_SUFFIX = ".data"

OnTensor = Callable[[int, int], None]

Graph = tuple[str, ir.Model, Mapping[str, Weight]]
"""File name of a graph, the graph, and the tensors of its initializers without a value."""

# Runtimes map external data into memory; a tensor that starts at a page boundary needs no copy.
PAGE = 4096
SMALL = 64
# Rows are converted in pieces of about this size, which stay in the processor's cache until they are written.
PIECE_BYTES = 2 << 20


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
    stored = _DistinctWeights(graphs)
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


class _DistinctWeights:
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
        """Return the place of an earlier equal weight, otherwise its own. Only weights with equal corners are read."""
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
    """Bind an initializer to its place in a data file: file name, offset, length."""
    assert value.shape is not None
    assert value.name is not None
    value.type = ir.TensorType(dtype)
    value.const_value = ir.ExternalTensor(*place, dtype, shape=value.shape, name=value.name, base_dir=str(folder))


class DataFile:
    """A new data file. Leaving the context waits for unfinished writes.

    Args:
        path: Path of the file, which must not exist.
        threads: Threads that convert and write.
    """

    def __init__(self, path: Path, *, threads: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._end = 0
        self._most = 4 * threads
        self._torch_threads = torch.get_num_threads()
        # Each thread works alone on its piece.
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self._waiting: deque[Future[None]] = deque()
        self._buffers = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            while self._waiting and kind is None:
                self._waiting.popleft().result()
            os.ftruncate(self._descriptor, self._end)  # extends a file that ends with empty tensors
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self._torch_threads)
            os.close(self._descriptor)

    def write_bytes(self, data: bytes) -> tuple[int, int]:
        """Append bytes; return offset and length."""
        offset = self._reserve(len(data))
        _write_all(self._descriptor, memoryview(data), offset)
        return offset, len(data)

    def write_tensor(self, tensor: Weight, *, name: str) -> tuple[int, int]:
        """Append a tensor as contiguous float32; return offset and length. tensor: (rows, …).

        Raises:
            ONNXExportError: ``NON_FINITE_WEIGHTS``, in this tensor or one before it.
        """
        length = 4 * tensor.numel()
        offset = self._reserve(length)
        rows = tensor.reshape(1) if isinstance(tensor, torch.Tensor) and tensor.dim() == 0 else tensor
        row_bytes = length // max(len(rows), 1)
        step = max(1, PIECE_BYTES // max(row_bytes, 1))
        for start in range(0, len(rows) if length else 0, step):
            while len(self._waiting) >= self._most:
                self._waiting.popleft().result()
            piece = slice(start, start + step)
            self._waiting.append(self._pool.submit(self._write_rows, rows, piece, offset + start * row_bytes, name))
        return offset, length

    def _reserve(self, length: int) -> int:
        offset = self._end + -self._end % (PAGE if length >= PAGE else SMALL)
        self._end = offset + length
        return offset

    def _write_rows(self, rows: Weight, piece: slice, offset: int, name: str) -> None:
        block = self._as_float32(rows[piece]).numpy()
        if not np.isfinite(block).all():
            raise ONNXExportError(
                f"weight {name!r} contains NaN or infinity",
                reason="NON_FINITE_WEIGHTS",
                remedy="check the checkpoint: training may have diverged",
                about={"tensor": name},
            )
        _write_all(self._descriptor, block.data.cast("B"), offset)

    def _as_float32(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a piece as contiguous float32, valid until the next one of this thread."""
        if piece.dtype == torch.float32 and piece.is_contiguous():
            return piece
        result = self._buffer("result", piece.shape)
        if piece.dim() == 2 and piece.stride(0) == 1:  # convert in the order of the file, then transpose
            return result.copy_(self._buffer("stored", piece.t().shape).copy_(piece.t()).t())
        return result.copy_(piece)

    def _buffer(self, use: str, shape: torch.Size) -> torch.Tensor:
        """Return this thread's memory for a use: new memory for every piece would cost more than the conversion."""
        buffer: torch.Tensor | None = getattr(self._buffers, use, None)
        if buffer is None or buffer.numel() < shape.numel():
            buffer = torch.empty(shape.numel())
            setattr(self._buffers, use, buffer)
        return buffer[: shape.numel()].view(shape)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
