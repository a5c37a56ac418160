"""Stored tensors read in blocks by position: no mapping (a file cut short meanwhile is an error, not a crash), no copy kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from slipway.errors import ModelMergeError
from slipway.safetensors_file import TensorInfo, corrupt

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorReader:
    """Reads byte ranges of stored tensors; keeps its files open until it is closed. Threads may share it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def descriptor(self, path: Path) -> int:
        """File descriptor of an input file, open for reading."""
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, self._open[path])
            return self._open[path]

    def fill(self, buffer: torch.Tensor, info: TensorInfo, offset: int) -> None:
        """Fill a one-dimensional uint8 buffer with a tensor's bytes from ``offset`` (within the tensor) on.

        Raises:
            CheckpointValidationError: ``SAFETENSORS_CORRUPT`` when the file has become shorter.
        """
        view = buffer.numpy().data
        position = info.start + offset
        while view:
            count = os.preadv(self.descriptor(info.file), [view], position)
            if count == 0:
                raise corrupt(info.file, f"it ends at byte {position}, within tensor {info.name!r}", tensor=info.name)
            view, position = view[count:], position + count

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A whole tensor of a floating-point type."""
        dtype = torch_dtype(info)
        buffer = torch.empty(info.nbytes, dtype=torch.uint8)
        self.fill(buffer, info, 0)
        return buffer.view(dtype).reshape(info.shape)

    def same(self, first: TensorInfo, second: TensorInfo, *, block_bytes: int = 8 << 20) -> bool:
        """Whether two stored tensors hold the same values (the same bytes, when they have the same type)."""
        if first.shape != second.shape:
            return False
        if first.dtype != second.dtype:
            return self._same_values(first, second)
        buffers = torch.empty(2, min(block_bytes, max(first.nbytes, 1)), dtype=torch.uint8)
        for offset in range(0, first.nbytes, block_bytes):
            size = min(block_bytes, first.nbytes - offset)
            self.fill(buffers[0, :size], first, offset)
            self.fill(buffers[1, :size], second, offset)
            if not torch.equal(buffers[0, :size], buffers[1, :size]):
                return False
        return True

    def _same_values(self, first: TensorInfo, second: TensorInfo) -> bool:
        return torch.equal(self.read(first).double(), self.read(second).double())


def row_blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of blocks of at most ``max_elements``, seen as a matrix of ``shape[0]`` rows; at least one row each."""
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    step = max(1, max_elements // max(columns, 1))
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def check_finite(tensor: torch.Tensor, name: str, where: str) -> None:
    """Refuse NaN and infinity; one pass, since minimum and maximum propagate both.

    Raises:
        ModelMergeError: ``NON_FINITE_WEIGHTS``.
    """
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ModelMergeError(
            f"tensor {name!r} of {where} holds NaN or infinity",
            reason="NON_FINITE_WEIGHTS",
            remedy="the result overflows this data type: merge in bfloat16 or float32"
            if where == "the merged result"
            else "copy the file again; if the training diverged, use an earlier checkpoint",
            about={"tensor": name, "where": where},
        )


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """The type of a stored tensor that can be computed with.

    Raises:
        ModelMergeError: ``DTYPE_UNSUPPORTED``.
    """
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise ModelMergeError(
            f"tensor {info.name!r} has data type {info.dtype}: merged are {', '.join(TORCH_DTYPES)}",
            reason="DTYPE_UNSUPPORTED",
            remedy="use a 16-bit or 32-bit version of the model",
            about={"tensor": info.name, "dtype": info.dtype},
        )
    return dtype
