"""Write the external data of a graph: float32 tensors, converted a few rows at a time by several threads."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from slipway.errors import ONNXExportError
from slipway_onnx_export.loading.conversion import Weight

# Runtimes map external data into memory; a tensor that starts at a page boundary needs no copy.
PAGE = 4096
SMALL = 64
# Rows are converted in pieces of about this size, which stay in the processor's cache until they are written.
PIECE_BYTES = 2 << 20


class DataFile:
    """A new data file. Leaving the context waits for all that is under way.

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
            os.ftruncate(self._descriptor, self._end)  # of a file that ends with empty tensors
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
        found: torch.Tensor | None = getattr(self._buffers, use, None)
        if found is None or found.numel() < shape.numel():
            found = torch.empty(shape.numel())
            setattr(self._buffers, use, found)
        return found[: shape.numel()].view(shape)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
