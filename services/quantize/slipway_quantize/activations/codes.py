"""Codes of eight bits: their types, how graphs hold them, ranges of what is rounded, and weights in codes.

A weight is written a few rows at a time, with one scale per output feature. Of the inputs of products, ranges on text are known, and how
features share their outliers with the weights.

Axes: N output features, K input features. A weight is stored (K, N), or (N, K); its codes keep that layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.model.dtypes import numpy_dtypes
from slipway_quantize.graphs.folder import DataFile, row_chunks
from slipway_quantize.graphs.left_out import LazyMatrix
from slipway_quantize.graphs.weights import Weight
from slipway_quantize.grid.rounding import require_finite
from slipway_quantize.pieces import Pieces, Squares

_E4M3 = numpy_dtypes("F8_E4M3")["F8_E4M3"]

Array = NDArray[Any]

Values = Array | LazyMatrix
_SIDE_BY_SIDE = 2
"""Products that processors add before they widen the sum; see :attr:`Codes.in_pairs`."""


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


@dataclass(frozen=True, slots=True)
class Channels:
    """A weight in codes.

    Attributes:
        codes: In the layout of the weight.
        scales: float32 (N,)
    """

    codes: ir.ExternalTensor
    scales: ir.ExternalTensor


def largest_inputs(weight: Weight, values: Values) -> Array:
    """Return the largest magnitude that the weight has for each input feature. float32 (K,)."""
    return _largest(weight, values, by_row=weight.transposed, reach=_magnitudes)


def write_channels(
    weights: Sequence[Weight],
    values: Sequence[Values],
    factors: Array | None = None,
    *,
    codes: Codes,
    name: str,
    data: DataFile,
    pieces: Pieces,
) -> Channels:
    """Write weights of the same layout and input, whose output features follow each other.

    Args:
        weights: The weights.
        values: Their values.
        factors: Factors of the input features, (K,); None: 1.
        codes: Type of the codes.
        name: Name of the joined weight.
        data: The data file.
        pieces: Receives the work.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``.
    """
    turned, columns = weights[0].transposed, weights[0].features[1]
    reach = _sums if codes.in_pairs else _magnitudes
    largest = np.concatenate(
        [_largest(*each, by_row=not turned, reach=reach, factors=factors) for each in zip(weights, values, strict=True)]
    )
    scale = np.where(largest > 0, largest / codes.largest, 1).astype(np.float32)  # (N,)
    shape = (columns, len(scale)) if turned else (len(scale), columns)
    stored = data.reserve(f"{name}.{codes.ending}", codes.dtype, shape)
    scales = data.reserve(f"{name}.{codes.ending}_scale", ir.DataType.FLOAT, (len(scale),))
    data.fill(scales, scale)

    def write(made: Sequence[tuple[Weight, Values]], row: int, first: int) -> Squares:
        """Write rows of weights beside each other; ``first`` is the row of the weight, and ``row`` that of the result."""
        exact = np.concatenate([_read_exact(weight, piece, first, factors) for weight, piece in made], axis=1)
        by = scale[None, :] if turned else scale[row : row + len(exact), None]
        rounded = codes.round(exact / by)
        data.fill(stored, rounded, row=row)
        error = rounded.astype(np.float32) * by - exact
        return float(np.vdot(error, error)), float(np.vdot(exact, exact))

    if turned:
        for row, piece in row_chunks(values[0]):
            beside = [piece, *(each[row : row + len(piece)] for each in values[1:])]
            pieces.add(partial(write, list(zip(weights, beside, strict=True)), row, row))
        return Channels(stored, scales)
    start = 0
    for weight, each in zip(weights, values, strict=True):
        for row, piece in row_chunks(each):
            pieces.add(partial(write, [(weight, piece)], start + row, row))
        start += weight.features[0]
    return Channels(stored, scales)


def _read_exact(weight: Weight, piece: Values, row: int, factors: Array | None) -> Array:
    """Return rows of the stored matrix in float32, with their input features multiplied."""
    exact = np.asarray(piece).astype(np.float32)
    require_finite(exact, weight.name)
    if factors is not None:
        exact *= factors[row : row + len(exact), None] if weight.transposed else factors[None, :]
    return exact


def _largest(
    weight: Weight, values: Values, *, by_row: bool, reach: Callable[[Array, int], Array], factors: Array | None = None
) -> Array:
    """Apply ``reach`` to each row of the stored matrix, or to each column."""
    parts: list[Array] = []
    for row, piece in row_chunks(values, multiple=_SIDE_BY_SIDE):
        exact = _read_exact(weight, piece, row, factors)
        if by_row:
            parts.append(reach(exact, 1))
        else:
            parts[:] = [np.maximum(parts[0], reach(exact, 0)) if parts else reach(exact, 0)]
    return np.concatenate(parts)


def _magnitudes(exact: Array, axis: int) -> Array:
    """Return the largest magnitude along an axis."""
    largest: Array = np.abs(exact).max(axis=axis)
    return largest


def _sums(exact: Array, axis: int) -> Array:
    """Return the largest magnitude along the axis of input features, of single values and of sums of two side by side."""
    pairs = exact.shape[axis] // _SIDE_BY_SIDE
    along = np.moveaxis(exact, axis, 0)[: pairs * _SIDE_BY_SIDE]
    sums = along[::_SIDE_BY_SIDE] + along[1::_SIDE_BY_SIDE]  # two of opposite signs: less than the larger one
    return np.maximum(_magnitudes(exact, axis), np.abs(sums).max(axis=0, initial=0))
