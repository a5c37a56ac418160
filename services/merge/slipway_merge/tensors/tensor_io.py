"""Read stored tensors in blocks by position, and sample their rows, the same in every run, to measure differences.

Files are not mapped: one that is truncated meanwhile is an error, not a crash. Differences are measured against rounding
errors.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from slipway.errors import ModelMergeError
from slipway.model.dtypes import FLOATS, numpy_dtypes
from slipway.model.safetensors_file import TensorInfo, corrupt_error

Array = np.ndarray[Any, np.dtype[Any]]

#: Types supported for computing, by safetensors name.
FLOAT_TYPES = numpy_dtypes(*FLOATS)
#: Bits of a type that are all set in NaN and infinity, and never in a number.
_NOT_FINITE: dict[str, np.unsignedinteger[Any]] = {
    "F64": np.uint64(0x7FF0_0000_0000_0000),
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "F8_E5M2": np.uint8(0x7C),
    "F8_E4M3": np.uint8(0x7F),
}
_SCAN_BYTES = 1 << 18

#: Number of sampled rows of each weight.
SAMPLE_ROWS = 16
#: Largest relative error of rounding to a type: half a unit in the last of its digits.
UNIT_ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
#: Largest absolute error of rounding among a type's smallest numbers.
SMALLEST_ERROR = {"F64": 2.0**-1075, "F32": 2.0**-150, "F16": 2.0**-25, "BF16": 2.0**-134}
#: Rounding errors are practically independent, so their sum is within this many standard deviations.
DEVIATIONS = 8.0
#: Error of a computation, in units of its type's last digit relative to the largest summand.
COMPUTING_UNITS = 64


class TensorReader:
    """Reads byte ranges of stored tensors; keeps files open until it is closed. Safe for several threads."""

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
        """Return the descriptor of an input file, open for reading."""
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, self._open[path])
            return self._open[path]

    def fill(self, buffer: Array, info: TensorInfo, offset: int) -> None:
        """Fill a one-dimensional uint8 buffer with a tensor's bytes from ``offset`` (within the tensor) on.

        Raises:
            CheckpointValidationError: ``SAFETENSORS_CORRUPT`` if the file has become shorter.
        """
        view = buffer.data
        position = info.start + offset
        while view:
            count = os.preadv(self.descriptor(info.file), [view], position)
            if count == 0:
                raise corrupt_error(
                    info.file, f"it ends at byte {position}, within tensor {info.name!r}", tensor=info.name
                )
            view, position = view[count:], position + count

    def read(self, info: TensorInfo) -> Array:
        """Return a whole tensor of a floating-point type."""
        dtype = float_type(info)
        buffer = np.empty(info.nbytes, np.uint8)
        self.fill(buffer, info, 0)
        return buffer.view(dtype).reshape(info.shape)

    def same(self, first: TensorInfo, second: TensorInfo, *, block_bytes: int = 8 << 20) -> bool:
        """Return whether two stored tensors hold the same values (of the same type: the same bytes)."""
        if first.shape != second.shape:
            return False
        if first.dtype != second.dtype:
            return self._same_values(first, second, elements=block_bytes // 8)
        buffers = np.empty((2, min(block_bytes, max(first.nbytes, 1))), np.uint8)
        for offset in range(0, first.nbytes, block_bytes):
            size = min(block_bytes, first.nbytes - offset)
            self.fill(buffers[0, :size], first, offset)
            self.fill(buffers[1, :size], second, offset)
            if not np.array_equal(buffers[0, :size], buffers[1, :size]):
                return False
        return True

    def _same_values(self, first: TensorInfo, second: TensorInfo, *, elements: int) -> bool:
        for start in range(0, first.numel, elements):
            values = []
            for info in (first, second):
                dtype = float_type(info)
                buffer = np.empty(min(elements, first.numel - start) * dtype.itemsize, np.uint8)
                self.fill(buffer, info, start * dtype.itemsize)
                values.append(buffer.view(dtype).astype(np.float64))
            if not np.array_equal(values[0], values[1]):
                return False
        return True

    def scan(self, info: TensorInfo, start: int, end: int) -> None:
        """Read a part of a tensor and refuse NaN and infinity.

        Args:
            info: The tensor.
            start: First byte within the tensor, the beginning of a number.
            end: End of the last number.

        Raises:
            ModelMergeError: ``NON_FINITE_WEIGHTS``.
            CheckpointValidationError: As :meth:`fill`.
        """
        if info.dtype not in _NOT_FINITE:
            return
        buffer = np.empty(min(_SCAN_BYTES, end - start), np.uint8)
        for offset in range(start, end, _SCAN_BYTES):
            block = buffer[: min(_SCAN_BYTES, end - offset)]
            self.fill(block, info, offset)
            check_finite(block, info.dtype, name=info.name, where=info.file.name)


def row_blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of blocks of at most ``max_elements``, seen as a matrix of ``shape[0]`` rows; at least one row each."""
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    step = max(1, max_elements // max(columns, 1))
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def is_finite(values: Array, dtype: str) -> bool:
    """Return whether stored values hold neither NaN nor infinity, as types without them never do.

    Args:
        values: Values of any type, or their bytes; contiguous.
        dtype: Safetensors name of their type.
    """
    mask = _NOT_FINITE.get(dtype)
    if mask is None:
        return True
    bits = values.reshape(-1).view(mask.dtype)
    return bits.size == 0 or bool((bits & mask).max() != mask)


def check_finite(values: Array, dtype: str, *, name: str, where: str) -> None:
    """Refuse NaN and infinity.

    Args:
        values: As for :func:`is_finite`.
        dtype: Safetensors name of their type.
        name: Name of the tensor.
        where: Its file or model; part of the error.

    Raises:
        ModelMergeError: ``NON_FINITE_WEIGHTS``.
    """
    if not is_finite(values, dtype):
        raise ModelMergeError(
            f"tensor {name!r} of {where} holds NaN or infinity",
            reason="NON_FINITE_WEIGHTS",
            remedy="the result overflows this data type: merge in bfloat16 or float32"
            if where == "the merged result"
            else "copy the file again; if the training diverged, use an earlier checkpoint",
            about={"tensor": name, "where": where},
        )


def float_type(info: TensorInfo) -> np.dtype[Any]:
    """Return the numpy type of a stored floating-point tensor.

    Raises:
        ModelMergeError: ``DTYPE_UNSUPPORTED``.
    """
    dtype = FLOAT_TYPES.get(info.dtype)
    if dtype is None:
        raise ModelMergeError(
            f"tensor {info.name!r} has data type {info.dtype}; supported are {', '.join(FLOAT_TYPES)}",
            reason="DTYPE_UNSUPPORTED",
            remedy="use a 16-bit or 32-bit version of the model",
            about={"tensor": info.name, "dtype": info.dtype},
        )
    return dtype


def generator(name: str) -> np.random.Generator:
    """Return the random generator of a tensor's sample."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def wide_roundoff(dtype: str) -> float:
    """Return the unit roundoff of the type in which values of ``dtype`` are computed."""
    return UNIT_ROUNDOFF["F64" if dtype in ("F32", "F64") else "F32"]


def sampled_rows(info: TensorInfo) -> list[int]:
    """Return the numbers of the sampled rows of a tensor, seen as a matrix of its last dimension."""
    rows = math.prod(info.shape[:-1])
    return sorted(generator(info.name).choice(rows, min(SAMPLE_ROWS, rows), replace=False).tolist())


def read_rows(reader: TensorReader, info: TensorInfo, numbers: list[int]) -> Array:
    """Return the rows of a stored tensor, seen as a matrix of its last dimension, in float64: (rows, columns)."""
    columns = info.shape[-1] if info.shape else 1
    dtype = FLOAT_TYPES[info.dtype]
    rows = np.empty((len(numbers), columns), dtype)
    for place, number in enumerate(numbers):
        reader.fill(rows[place].view(np.uint8), info, number * columns * dtype.itemsize)
    return rows.astype(np.float64)


def share_of_rounding(written: Array, expected: Array, dtype: str) -> float:
    """Return the largest difference between written and expected values, as a share of what rounding to ``dtype`` explains."""
    computing = COMPUTING_UNITS * wide_roundoff(dtype) * np.abs(expected).max(initial=0.0)
    tolerance = np.abs(expected) * UNIT_ROUNDOFF[dtype] + SMALLEST_ERROR[dtype] + computing + 1e-300
    return float((np.abs(written - expected) / tolerance).max(initial=0.0))
