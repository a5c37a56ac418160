"""Convert 16-bit types, rounded once: between float16 and float32 with numpy's results, but several times as fast.

numpy converts float16 one by one. Here, numbers that are normal in float16 (nearly all) take a few steps on whole arrays of bits;
zeros, subnormal numbers, overflows, infinity and NaN are left to numpy. ml_dtypes converts float64 to bfloat16 through float32,
which rounds twice.
"""

from __future__ import annotations

import numpy as np

from slipway_merge.tensors.block import Block
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, Array

_MANTISSA_SHIFT = 23 - 10
_EXPONENT_SHIFT = (127 - 15) << 23
_SMALLEST_NORMAL = 0x38800000  # 2⁻¹⁴ as float32
_OVERFLOW = 0x477FF000  # 65520, the first number that rounds to infinity


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
    np.bitwise_and(bits, np.int32(-0x70000001), out=bits)  # of the sign's copies, the highest alone
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
