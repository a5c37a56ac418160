"""The types that weights and activations are rounded to, how graphs hold them, and what is known of products' inputs.

Known are the inputs' ranges on text, and how features share their outliers with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.model.dtypes import numpy_dtypes

_E4M3 = numpy_dtypes("F8_E4M3")["F8_E4M3"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Codes:
    """A type with eight bits. Codes are symmetric, because TensorRT takes no zero points.

    Attributes:
        name: In ``quantization.json``.
        ending: Of the names of tensors.
        dtype: In graphs.
        largest: Largest magnitude of a code.
        opset: The first with scales per output feature for this type.
        in_pairs: Whether the sum of two codes side by side is at most ``largest`` too. x86 processors without VNNI add products of an unsigned
            byte (at most 255) and a signed one in pairs, in 16 bits, which saturate: 255 · 127 · 2 does not fit, 255 · 128 does. Each of
            the two roundings adds at most half a code.
    """

    name: str
    ending: str
    dtype: ir.DataType
    largest: float
    opset: int
    in_pairs: bool

    def round(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the nearest codes of float32 values, which are in units of a step."""
        inside = np.clip(values, -self.largest, self.largest)
        return np.rint(inside).astype(np.int8) if self is INT8 else inside.astype(_E4M3)

    def zeros(self, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """Return zero points."""
        return np.zeros(shape, np.int8 if self is INT8 else _E4M3)

    def step(self, largest: float) -> np.float32:
        """Return the step of codes at which the largest code stands for this magnitude."""
        return np.float32(max(largest, 1e-30) / self.largest)


INT8 = Codes("int8", "i8", ir.DataType.INT8, 127, opset=13, in_pairs=True)
E4M3 = Codes("fp8 (E4M3)", "f8", ir.DataType.FLOAT8E4M3FN, 448, opset=19, in_pairs=False)


@dataclass(frozen=True, slots=True)
class Form:
    """How a graph holds products of codes.

    Attributes:
        codes: The type.
        dequantized_first: Whether codes of weights go into DequantizeLinear and nowhere else, which TensorRT requires. Tables in which
            tokens are looked up then keep their type.
    """

    codes: Codes = INT8
    dequantized_first: bool = False


PLAIN = Form()
"""int8, with codes wherever ONNX allows them."""


@dataclass(frozen=True, slots=True)
class Range:
    """The range of one value.

    Attributes:
        largest: Magnitude that the largest code stands for, after the division by ``factors``.
        factors: Divisor of each feature, by which the weights are multiplied; None: 1. float32 (K,)
    """

    largest: float
    factors: Array | None = None


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of a graph.

    Attributes:
        of: Range by the name of the value that products read.
        kept: Values whose products stay as they are, with the reason.
        facts: What was measured, for ``quantization.json``.
    """

    of: Mapping[str, Range]
    kept: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
