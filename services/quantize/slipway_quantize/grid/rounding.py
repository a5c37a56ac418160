"""Round pieces of weights to the grid of a level: packed codes, scales, and the rounding error.

A compiled kernel rounds groups of weights; without it, numpy does the same in more passes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.machine.compiled.library import best_kernel
from slipway.texts import counted
from slipway_quantize.grid.search import Array, dequantize_groups, pack_codes, quantize_groups, steps_of, unpack_codes

_CHUNK = 1 << 17
"""Weights that numpy works on at once: they stay in the processor's cache."""

FOLDER = Path(__file__).parent
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The kernel's ``enum type``, by numpy's names."""
MOST = 256
"""Most weights of a group."""
KERNEL_BITS = (3, 4, 8)
"""The widths that the kernel is compiled for; numpy rounds to all others."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded piece of a weight.

    Attributes:
        packed: Packed codes. uint8 (N, K · bits / 8)
        scales: (N, G)
        error: Sum of squares of the rounding error.
        energy: Sum of squares of the weights.
        zero_points: int8 (N, G); None where all are 0.
    """

    packed: Array
    scales: Array
    error: float
    energy: float
    zero_points: Array | None = None

    def values(self, bits: int) -> Array:
        """Return the rounded weights, float32 (N, K)."""
        return dequantize_groups(unpack_codes(self.packed, bits=bits), self.scales, self.zero_points)


def round_weight(weight: Array, *, bits: int, group_size: int, scale_dtype: np.dtype[Any], name: str) -> Rounded:
    """Round a piece of a weight to the nearest codes of a grid with fitted scales, as :func:`~slipway_quantize.grid.search.quantize_groups`.

    Args:
        weight: Any float type and strides; K divisible by ``group_size``. (N, K)
        bits: From 2 to 8.
        group_size: Weights per scale.
        scale_dtype: Stored type of the scales: float32, float16 or bfloat16.
        name: The weight's name, for errors.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``, or ``WEIGHT_OVERFLOW`` if the scales' type cannot hold a scale.
    """
    rows, columns = weight.shape
    packed = np.empty((rows, columns * bits // 8), np.uint8)
    scales = np.empty((rows, columns // group_size), scale_dtype)
    squares = (0.0, 0.0)
    if weight.size:
        squares = _fill(_make_readable(weight), bits=bits, packed=packed, scales=scales, name=name)
    return Rounded(packed, scales, *squares)


def _fill(weight: Array, *, bits: int, packed: Array, scales: Array, name: str) -> tuple[float, float]:
    """Fill codes and scales; return the squares of error and weights."""
    if bits in KERNEL_BITS and (compiled := kernel()):
        sums = compiled.quantize(weight, steps_of(bits), bits=bits, packed=packed, scales=scales)
        if not sums.finite:
            require_finite(weight, name)
        if not sums.fits:
            raise overflow_error(weight, scales, name)
        return sums.error, sums.energy
    require_finite(weight, name)
    size, error, energy = weight.shape[1] // scales.shape[1], 0.0, 0.0
    step = max(1, _CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        codes, scales[rows] = quantize_groups(weight[rows], bits=bits, group_size=size, scale_dtype=scales.dtype)
        packed[rows] = pack_codes(codes, bits=bits)
        if not np.isfinite(scales[rows]).all():
            raise overflow_error(weight, scales[rows], name)
        exact = weight[rows].astype(np.float32)
        error += float(np.square(dequantize_groups(codes, scales[rows]) - exact).sum(dtype=np.float64))
        energy += float(np.square(exact).sum(dtype=np.float64))
    return error, energy


def _make_readable(weight: Array) -> Array:
    """Return the weight in a type and layout that the kernel reads."""
    if weight.dtype.name not in TYPES:
        return weight.astype(np.float32, order="C")
    row, column = weight.strides
    if weight.flags.c_contiguous or (row == weight.itemsize and column >= row * len(weight)):
        return weight
    return np.ascontiguousarray(weight)


def require_finite(values: Array, name: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``, with the tensor's name and the number of values that are not finite.
    """
    count = values.size - int(np.count_nonzero(np.isfinite(values)))
    if count:
        raise QuantizationError(
            f"tensor {name!r} has {counted(count, 'NaN or infinite value')}",
            reason="NON_FINITE_WEIGHTS",
            remedy="the training diverged or the file is damaged: use an earlier checkpoint",
            about={"tensor": name, "count": count},
        )


def overflow_error(weight: Array, scales: Array, name: str) -> QuantizationError:
    """Return the error of a weight whose scales are beyond the range of their stored type."""
    largest, dtype = float(np.abs(weight).max()), scales.dtype.name
    return QuantizationError(
        f"tensor {name!r} holds {largest:.6g}, so a scale of its groups is beyond the range of {dtype}",
        reason="WEIGHT_OVERFLOW",
        remedy="use bf16, which has the range of float32, or convert the model to bfloat16 first",
        about={"tensor": name, "largest": largest, "dtype": dtype},
    )


class _Task(ctypes.Structure):
    """The kernel's ``struct task``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "packed", "steps")),
        *((name, ctypes.c_int64) for name in ("count", "rows", "groups", "size", "bits", "leading")),
        *((name, ctypes.c_int64) for name in ("weight_type", "scale_type")),
    )


class Sums(ctypes.Structure):
    """Results of a call: the kernel's ``struct sums``."""

    _fields_ = (
        ("error", ctypes.c_double),
        ("energy", ctypes.c_double),
        ("finite", ctypes.c_int64),
        ("fits", ctypes.c_int64),
    )

    error: float
    energy: float
    finite: int
    fits: int


class Kernel:
    """One of the kernels of the library.

    Args:
        library: The library.
        name: The instructions that it uses.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._quantize = library[f"quantize_{name}"]
        self._quantize.argtypes = [ctypes.POINTER(_Task), ctypes.POINTER(Sums)]
        self._quantize.restype = None

    def quantize(
        self, weight: NDArray[Any], steps: NDArray[np.float32], *, bits: int, packed: NDArray[Any], scales: NDArray[Any]
    ) -> Sums:
        """Fill ``packed`` and ``scales`` as :func:`slipway_quantize.grid.search.quantize_groups` does; other threads can work meanwhile.

        Args:
            weight: float32, float16 or bfloat16, with contiguous rows or contiguous columns. (N, K)
            steps: Tried steps.
            bits: One of ``KERNEL_BITS``.
            packed: uint8. (N, K · bits / 8)
            scales: float32, float16 or bfloat16. (N, G)
        """
        assert bits in KERNEL_BITS
        rows, columns = weight.shape
        groups = scales.shape[1]
        size = columns // groups
        leading = 0 if weight.flags.c_contiguous else weight.strides[1] // weight.itemsize
        assert leading == 0 or weight.strides[0] == weight.itemsize
        assert packed.dtype == np.uint8
        assert packed.shape == (rows, columns * bits // 8)
        assert len(scales) == rows
        assert columns == size * groups
        assert size in {16, 32, 64, 128, MOST}
        assert packed.flags.c_contiguous
        assert scales.flags.c_contiguous
        sums = Sums()
        task = _Task(
            *(array.ctypes.data for array in (weight, scales, packed, steps)),
            *(len(steps), rows, groups, size, bits, leading),
            *(TYPES[array.dtype.name] for array in (weight, scales)),
        )
        self._quantize(task, sums)
        return sums


@cache
def kernel() -> Kernel | None:
    """Return the kernel for this processor, if there is one."""
    best = best_kernel(FOLDER)
    return Kernel(*best) if best else None


@dataclass(frozen=True, slots=True)
class GivenCodes:
    """Integers of some rows of a weight: a value is (code - zero point) · scale.

    Attributes:
        codes: int8 (N, K)
        scales: float32 (N, G)
        zero_points: int8 (N, G), or None where all are 0.
    """

    codes: Array
    scales: Array
    zero_points: Array | None

    def pack(self, weight: Array, *, bits: int, scale_dtype: np.dtype[Any], name: str) -> Rounded:
        """Pack the codes; return them with scales of the stored type.

        Args:
            weight: The rows that they stand for, any float type. (N, K)
            bits: Bits of a code.
            scale_dtype: Stored type of the scales.
            name: The weight's name, for errors.

        Raises:
            QuantizationError: ``NON_FINITE_WEIGHTS``, or ``WEIGHT_OVERFLOW`` if the type cannot hold a scale.
        """
        require_finite(weight, name)
        with np.errstate(over="ignore"):
            scales = self.scales.astype(scale_dtype)
        if not np.isfinite(scales).all():
            raise overflow_error(weight, scales, name)
        exact = weight.astype(np.float32)
        difference = dequantize_groups(self.codes, scales, self.zero_points)
        difference -= exact
        return Rounded(
            pack_codes(self.codes, bits=bits),
            scales,
            float(np.square(difference).sum(dtype=np.float64)),
            float(np.square(exact).sum(dtype=np.float64)),
            self.zero_points,
        )
