"""The compiled kernel for low-rank updates of bfloat16 weights, a thread's working memory, and conversions of 16-bit types.

If the installation had no C compiler, or the processor lacks fused multiply-add, numpy does the same in more passes.

Conversions round once. numpy converts float16 one by one; here, numbers that are normal in float16 (nearly all) take a few
steps on whole arrays of bits, with numpy's results but several times as fast, and zeros, subnormal numbers, overflows, infinity
and NaN are left to numpy. ml_dtypes converts float64 to bfloat16 through float32, which rounds twice.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from slipway.machine.compiled.library import best_kernel
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, Array

FOLDER = Path(__file__).parent

_MANTISSA_SHIFT = 23 - 10
_EXPONENT_SHIFT = (127 - 15) << 23
_SMALLEST_NORMAL = 0x38800000  # 2⁻¹⁴ as float32
_OVERFLOW = 0x477FF000  # 65520, the first number that rounds to infinity


class Counts(ctypes.Structure):
    """Results of a call: the kernel's ``struct counts``."""

    _fields_ = (("weight_sum", ctypes.c_double), ("changed", ctypes.c_int64), ("finite", ctypes.c_int64))

    weight_sum: float
    changed: int
    finite: int


class Kernel:
    """One of the kernels of the library.

    Args:
        library: The library.
        name: The instructions that it uses.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._panel: int = library.slipway_panel()
        self._merge = library[f"merge_{name}"]
        self._merge.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t] * 3 + [ctypes.POINTER(Counts)]
        self._merge.restype = None

    def panels(self, right: Array) -> Array:
        """Return a right factor (r, columns) in the layout of :meth:`merge`: groups of columns one after the other, padded with zeros."""
        missing = -right.shape[1] % self._panel
        padded = np.pad(right, ((0, 0), (0, missing))) if missing else right
        return np.ascontiguousarray(padded.reshape(len(right), -1, self._panel).transpose(1, 0, 2))

    def merge(self, base: Array, left: Array, panels: Array, *, out: Array) -> Counts:
        """Write ``base + left @ right``, rounded once, to ``out``; other threads can work meanwhile.

        Args:
            base: bfloat16. (rows, columns)
            left: float32. (rows, r)
            panels: The right factor. float32
            out: bfloat16; may be ``base`` itself. (rows, columns)
        """
        rows, columns = base.shape
        assert all(array.flags.c_contiguous for array in (base, left, panels, out))
        assert all(array.dtype == np.float32 for array in (left, panels))
        assert (len(left), out.shape) == (rows, base.shape)
        assert panels.shape == (-(-columns // self._panel), left.shape[1], self._panel)
        counts = Counts()
        arrays = (base.ctypes.data, out.ctypes.data, left.ctypes.data, panels.ctypes.data)
        self._merge(*arrays, rows, columns, left.shape[1], counts)
        return counts


@cache
def kernel() -> Kernel | None:
    """Return the kernel for this processor, if there is one."""
    best = best_kernel(FOLDER)
    return Kernel(*best) if best else None


def convert(source: Array, target: Array, block: Block) -> None:
    """Fill ``target`` with the values of ``source``, rounded to nearest, ties to even. Arrays of one shape; target contiguous."""
    if source.dtype == np.float16 and target.dtype == np.float32:
        rare = _widen(source, target, block)
    elif source.dtype == np.float32 and target.dtype == np.float16:
        rare = _narrow(source, target, block)
    else:
        if source.dtype == np.float64 and target.dtype == FLOAT_TYPES["BF16"]:
            source = _to_odd(source, block)
        np.copyto(target, source, casting="unsafe")
        return
    if rare.size:
        target.reshape(-1)[rare] = source.reshape(-1)[rare]


def _widen(source: Array, target: Array, block: Block) -> Array:
    """Widen; return the positions where the result is not right yet."""
    stored, bits = source.view(np.int16), target.view(np.int32)
    np.copyto(bits, stored)  # extends the sign
    np.left_shift(bits, _MANTISSA_SHIFT, out=bits)
    np.bitwise_and(bits, np.int32(-0x70000001), out=bits)  # keep only the highest copy of the sign
    np.add(bits, _EXPONENT_SHIFT, out=bits)
    exponent = np.bitwise_and(stored, 0x7C00, out=block.array("exponent", np.dtype(np.int16), source.shape))
    distance = exponent.view(np.uint16)
    np.subtract(distance, 0x0400, out=distance)
    return np.flatnonzero(distance >= 0x7800)  # exponents 0 and 31


def _to_odd(source: Array, block: Block) -> Array:
    """Return float32 numbers that round to the same bfloat16 as ``source``.

    They are truncated towards zero with the last bit set if anything was cut, so no new ties arise. Source: Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
    """
    narrow = block.array("odd", np.dtype(np.float32), source.shape)
    np.copyto(narrow, source, casting="unsafe")
    bits = narrow.view(np.int32)
    above, below = narrow > source, narrow < source
    bits -= np.where(bits < 0, below, above)
    bits |= above | below
    return narrow


def _narrow(source: Array, target: Array, block: Block) -> Array:
    """Round to float16; return the positions where the result is not right yet."""
    bits = source.view(np.int32)
    work = block.array("half", bits.dtype, source.shape)
    other = block.array("sign", bits.dtype, source.shape)
    np.right_shift(bits, _MANTISSA_SHIFT, out=work)
    np.bitwise_and(work, 1, out=work)  # a tie goes up where the last digit that stays is odd
    np.add(work, bits, out=work)
    np.add(work, (1 << (_MANTISSA_SHIFT - 1)) - 1 - _EXPONENT_SHIFT, out=work)
    np.right_shift(work, 16, out=other)
    np.bitwise_and(other, 0x8000, out=other)
    np.right_shift(work, _MANTISSA_SHIFT, out=work)
    np.bitwise_or(work, other, out=work)
    np.copyto(target.view(np.int16), work, casting="unsafe")
    np.bitwise_and(bits, 0x7FFFFFFF, out=other)
    np.subtract(other, _SMALLEST_NORMAL, out=other)
    return np.flatnonzero(other.view(np.uint32) >= _OVERFLOW - _SMALLEST_NORMAL)


class Block:
    """A thread's working memory for one block of a weight.

    It is reused for every block, so that it stays in the processor's cache and no page is mapped again.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}

    def array(self, use: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return an array for a use, valid until the next call for the same use. Its content is undefined."""
        size = math.prod(shape) * dtype.itemsize
        if use not in self._memory or self._memory[use].nbytes < size:
            self._memory[use] = np.empty(size, np.uint8)
        return self._memory[use][:size].view(dtype).reshape(shape)
