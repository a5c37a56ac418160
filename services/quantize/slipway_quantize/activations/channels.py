"""Write weights as codes of eight bits with one scale per output feature, a few rows at a time.

Axes: N output features, K input features. A weight is stored (K, N), or (N, K); its codes keep that layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway_quantize.activations.codes import Codes
from slipway_quantize.graphs.folder import DataFile, row_chunks
from slipway_quantize.graphs.left_out import LazyMatrix
from slipway_quantize.graphs.weights import Weight
from slipway_quantize.grid.rounding import require_finite
from slipway_quantize.pieces import Pieces, Squares

Array = NDArray[Any]
Values = Array | LazyMatrix
_SIDE_BY_SIDE = 2
"""Products that processors add before they widen the sum; see :attr:`Codes.in_pairs`."""


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
