"""Check a written file: ggml must find every tensor, and some of its rows, dequantized by other code, must be the model's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from slipway.errors import GGUFExportError
from slipway_gguf.weights.ggml import StoredTensor, row_bytes, stored_tensors
from slipway_gguf.weights.tensors import Planned
from slipway_gguf.weights.writing import Written, float32_rows

_ROWS = 4
"""Most rows to compare at each place of a tensor."""
_NOISE = {
    Kind.F32: 1e-7,
    Kind.F16: 1e-3,
    Kind.BF16: 5e-3,
    Kind.Q8_0: 1.5e-2,
    Kind.Q6_K: 5e-2,
    Kind.Q5_K: 1e-1,
    Kind.Q5_0: 1e-1,
    Kind.Q5_1: 1e-1,
    Kind.Q4_K: 2e-1,
    Kind.Q4_0: 2e-1,
    Kind.Q4_1: 2e-1,
    Kind.IQ4_XS: 2e-1,
    Kind.IQ4_NL: 2e-1,
}
"""Largest noise of rounding, relative to the values' energy (root mean square): about twice that of normally distributed weights."""
_SMALLEST = 2.0**-24
"""Distance between the smallest numbers of float16, which stores values or the scales of blocks."""
_MULTIPLES = {
    Kind.F16: 1,
    Kind.Q8_0: 127,
    Kind.Q6_K: 127 * 32,
    Kind.Q5_K: 63 * 31,
    Kind.Q5_0: 16,
    Kind.Q5_1: 32,
    Kind.Q4_K: 63 * 15,
    Kind.Q4_0: 8,
    Kind.Q4_1: 16,
    Kind.IQ4_XS: 32 * 127,
    Kind.IQ4_NL: 127,
}
"""Largest multiple of a block's scale. Rows near zero (tokens never trained) may be off by this multiple of the smallest number."""


def check_file(written: Written, tensors: list[Planned]) -> dict[str, Any]:
    """Read a file back, compare it with the model, and return facts for the report.

    Raises:
        GGUFExportError: ``GGUF_INVALID``.
    """
    stored = stored_tensors(written.path)
    expected = [(entry.name, entry.kind, entry.shape) for entry in written.entries]
    actual = [(each.name, each.kind, _pad_shape(each.shape, written, index)) for index, each in enumerate(stored)]
    if actual != expected:
        wrong = next(
            (pair for pair in zip(actual, expected, strict=False) if pair[0] != pair[1]), (len(actual), len(expected))
        )
        raise _invalid_error(written.path, f"ggml finds {wrong[0]}, and {wrong[1]} was written")
    worst, where = 0.0, ""
    for planned, tensor in zip(tensors, stored, strict=True):
        share = _noise(written.path, planned, tensor) / _NOISE[tensor.kind]
        if share > worst:
            worst, where = share, planned.name
    if worst > 1.0:
        raise _invalid_error(
            written.path, f"tensor {where!r} is {worst:.3g} times as far from the model's as its type explains"
        )
    return {"tensors_read_back": len(stored), "worst_share_of_expected_noise": round(worst, 4)}


def _pad_shape(shape: tuple[int, ...], written: Written, index: int) -> tuple[int, ...]:
    """Add the leading axes of size 1 that the tensor was written with; ggml drops them."""
    lacking = len(written.entries[index].shape) - len(shape) if index < len(written.entries) else 0
    return (1,) * lacking + shape


def _noise(path: Path, planned: Planned, stored: StoredTensor) -> float:
    """Return the largest distance of some rows from the model's, relative to the energy of these rows."""
    worst = 0.0
    for row, block in planned.samples():
        values = float32_rows(block, planned)[:_ROWS]
        read = _rows(path, planned, stored, first=row, count=len(values))
        energy = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
        distance = float(np.sqrt(np.mean(np.square(read.astype(np.float64) - values))))
        distance = max(0.0, distance - _MULTIPLES.get(stored.kind, 0) * _SMALLEST)
        worst = max(worst, distance / energy if energy else math.inf if distance else 0.0)
    return worst


def _rows(path: Path, planned: Planned, stored: StoredTensor, *, first: int, count: int) -> NDArray[np.float32]:
    """Read and dequantize rows of a tensor. (count, columns)."""
    size = row_bytes(stored.kind, planned.shape[-1])
    with path.open("rb") as file:
        file.seek(stored.offset + first * size)
        raw = np.frombuffer(file.read(count * size), np.uint8).reshape(count, size)
    return gguf.quants.dequantize(raw, stored.kind).astype(np.float32)


def _invalid_error(path: Path, what: str) -> GGUFExportError:
    return GGUFExportError(
        f"{path.name} is not what was written: {what}",
        remedy="check the disk and the versions of xllamacpp and gguf; report it if both are those of constraints.txt",
        about={"file": path.name},
    )
