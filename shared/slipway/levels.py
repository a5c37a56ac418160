"""Describe the levels of quantization: the types in which an output may store its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantizationLevel:
    """A level of quantization.

    Attributes:
        name: Such as ``int4``; what a user asks for, and the end of an output's name.
        dtype: Type of the stored weights: the row of validation's table of limits.
        bytes_per_weight: Size of an output of this level. Scales, and tensors that stay in 16 or 32 bit, raise it above that of
            the type alone.
        bits: Bits of integers that share a scale in groups, which ``calibrate`` can choose; None for all other types.
        wider: Bits that some weights of such a level may have instead, in mixed precision.
        activations: Whether activations are rounded too while the model runs.
        needs_text: Whether it cannot be made without text, for example to find the ranges of activations.
        takes_text: Whether it is made with the text of an export that has some, for example to find activations beyond its range.
    """

    name: str
    dtype: str
    bytes_per_weight: float
    bits: int | None = None
    wider: tuple[int, ...] = ()
    activations: bool = False
    needs_text: bool = False
    takes_text: bool = False


LEVELS: Mapping[str, QuantizationLevel] = {
    each.name: each
    for each in (
        QuantizationLevel("fp16", "float16", 2.0, takes_text=True),
        QuantizationLevel("bf16", "bfloat16", 2.0),
        QuantizationLevel("int8", "int8", 1.25, bits=8),
        QuantizationLevel("w8a8", "w8a8", 1.25, activations=True),
        QuantizationLevel("int8_static", "int8_static", 1.25, activations=True, needs_text=True),
        QuantizationLevel("int8_dynamic", "int8_dynamic", 1.25, activations=True),
        QuantizationLevel("fp8", "fp8", 1.25, activations=True),
        QuantizationLevel("fp8_static", "fp8_static", 1.25, activations=True, needs_text=True),
        QuantizationLevel("int4", "int4", 0.75, bits=4, wider=(8,)),
        QuantizationLevel("8da4w", "8da4w", 0.875, activations=True),
        QuantizationLevel("nvfp4", "nvfp4", 0.75),
        QuantizationLevel("mxfp4", "mxfp4", 0.75),
        QuantizationLevel("int3", "int3", 0.625, bits=3, wider=(4, 8)),
    )
}
"""Levels by name, from the tightest limits to the loosest."""

STORED_TYPES = ("float32", *dict.fromkeys(each.dtype for each in LEVELS.values()))
"""Types that weights are stored in, from the tightest limits to the loosest."""

WIDTHS = tuple(sorted({each.bits for each in LEVELS.values() if each.bits}))
"""The numbers of bits that integers on a grid may have."""


def bits_of(level: str) -> int | None:
    """Return the bits of a level of integers on a grid; None for any other, also an unknown one."""
    known = LEVELS.get(level)
    return known.bits if known else None


def widths_of(level: str) -> tuple[int, ...]:
    """Return the numbers of bits that the weights of a level of integers may have in mixed precision, its own first."""
    known = LEVELS.get(level)
    return (known.bits, *known.wider) if known and known.bits else ()
