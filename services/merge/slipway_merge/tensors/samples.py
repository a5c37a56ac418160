"""Sample rows of stored tensors, the same in every run, and measure differences against rounding errors."""

from __future__ import annotations

import math
import zlib

import numpy as np

from slipway.model.safetensors_file import TensorInfo
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, Array, TensorReader

#: Number of sampled rows of each weight.
SAMPLE_ROWS = 16
#: Largest relative error of rounding to a type: half a unit in the last of its digits.
UNIT_ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
#: The same in absolute terms where a type's numbers are smallest.
SMALLEST_ERROR = {"F64": 2.0**-1075, "F32": 2.0**-150, "F16": 2.0**-25, "BF16": 2.0**-134}
#: Rounding errors are practically independent, so their sum is within this many standard deviations.
DEVIATIONS = 8.0
#: Error of a computation, in units of its type's last digit relative to the largest summand.
COMPUTING_UNITS = 64


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
    found = np.empty((len(numbers), columns), dtype)
    for place, number in enumerate(numbers):
        reader.fill(found[place].view(np.uint8), info, number * columns * dtype.itemsize)
    return found.astype(np.float64)


def share_of_rounding(written: Array, expected: Array, dtype: str) -> float:
    """Return the largest difference between written and expected values, as a share of what rounding to ``dtype`` explains."""
    computing = COMPUTING_UNITS * wide_roundoff(dtype) * np.abs(expected).max(initial=0.0)
    tolerance = np.abs(expected) * UNIT_ROUNDOFF[dtype] + SMALLEST_ERROR[dtype] + computing + 1e-300
    return float((np.abs(written - expected) / tolerance).max(initial=0.0))
