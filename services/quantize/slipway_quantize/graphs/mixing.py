"""Choose the bits of each weight of graphs within a size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.stage import Context
from slipway_quantize.graphs.folder import DATA_PAGE, read_constant, row_chunks, tensor_key
from slipway_quantize.graphs.integers import CalibratedWeights
from slipway_quantize.graphs.left_out import LazyMatrix
from slipway_quantize.graphs.weights import Weight
from slipway_quantize.levels import IntLevel
from slipway_quantize.mixed.budget import SizeBudget
from slipway_quantize.mixed.choice import Candidate, Choice, choose_bits

_NODES = 768
"""Most bytes that a graph grows by when a product with one weight becomes one with integers."""


def choose_graph_bits(
    source: Path,
    graphs: Sequence[tuple[str, ir.Model]],
    fits: Mapping[str, Sequence[Weight]],
    given: CalibratedWeights,
    *,
    level: IntLevel,
    widths: tuple[int, ...],
    least: Mapping[str, int],
    scale_dtype: np.dtype[Any],
    budget: SizeBudget,
    ctx: Context,
) -> Choice:
    """Choose the bits of each weight; one that is in both graphs of a folder counts once.

    Raises:
        QuantizationError: ``SIZE_BUDGET_UNMET``.
    """
    candidates: dict[str, Candidate] = {}
    copied: dict[object, int] = {}
    weights: dict[object, int] = {}
    fixed = sum((source / name).stat().st_size for name, _ in graphs)
    for name, model in graphs:
        replaced = {weight.name for weight in fits[name]}
        for value in model.graph.initializers.values():
            if value.const_value is None:
                continue
            key = tensor_key(value.const_value)
            weights[key or (name, value.name)] = value.const_value.size
            if key is not None and value.name not in replaced:
                copied[key] = value.const_value.nbytes
        for weight in fits[name]:
            fixed += _NODES
            calibrated = given.get((name, weight.name))
            sizes = {
                bits: _integer_bytes(weight, scale_dtype, replace_bits=bits, level=level, zeros=calibrated)
                for bits in widths
                if bits >= least[weight.name]
            }
            measured = calibrated.sensitivity if calibrated is not None else None
            reads = _piece_readers(source, weight)
            candidates[weight.name] = Candidate(weight.name, sizes, reads, measured)
    total = fixed + _data_file_bytes(copied.values())
    return choose_bits(
        list(candidates.values()),
        fixed=total,
        budget=budget,
        weights=sum(weights.values()),
        group_size=level.group_size,
        ctx=ctx,
    )


def _data_file_bytes(sizes: Iterable[int]) -> int:
    """Return the size of a data file that has tensors of these sizes, one after the other."""
    end = 0
    for size in sizes:
        end += -end % (DATA_PAGE if size >= DATA_PAGE else 64) + size
    return end


def _most_bytes(size: int) -> int:
    """Return the most space that a tensor takes in a data file: large ones start at a page, so space after a small one may be unused."""
    return -(-size // DATA_PAGE) * DATA_PAGE


def _integer_bytes(
    weight: Weight, scale_dtype: np.dtype[Any], *, replace_bits: int, level: IntLevel, zeros: Any
) -> int:
    """Return the size of a weight's integers, scales and zero points. Only calibrated bits have zero points, each use in its own layout."""
    rows, columns = weight.features
    groups = columns // level.group_size
    parts = [rows * columns * replace_bits // 8, scale_dtype.itemsize * rows * groups]
    if zeros is not None and replace_bits == zeros.bits and "zero_points" in zeros.parts[0]:
        parts += [rows * groups] * (bool(weight.products) + bool(weight.lookups))
    return sum(map(_most_bytes, parts))


def _piece_readers(source: Path, weight: Weight) -> list[Callable[[], NDArray[Any]]]:
    values = read_constant(source, weight.value.const_value)
    return [partial(_read, piece) for _, piece in row_chunks(values.T if weight.transposed else values, multiple=16)]


def _read(piece: NDArray[Any] | LazyMatrix) -> NDArray[Any]:
    return np.asarray(piece)
