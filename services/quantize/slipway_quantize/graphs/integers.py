"""Get the integers of a graph's weights: from a calibration, or by rounding, with as many bits as a size allows.

Axes: N output features (or tokens), K input features, G groups of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.stage import Context
from slipway.texts import counted
from slipway_quantize.calibrated import WITHOUT_DATA, CalibratedWeight, Calibration
from slipway_quantize.graphs.folder import DATA_PAGE, read_constant, row_chunks, tensor_key
from slipway_quantize.graphs.left_out import LazyMatrix
from slipway_quantize.graphs.weights import Weight
from slipway_quantize.grid.mixed import Candidate, Choice, choose_bits
from slipway_quantize.grid.rounding import Rounded, round_weight
from slipway_quantize.levels import IntLevel, SizeBudget

_TRANSPOSED, _WEIGHT = ".T", ".weight"
"""Ends of an initializer's name (docs/onnx.md, "Form of the weights")."""
_JOINED = "+"
_LINEAGE = "lineage"
"""Property of a graph: the digest of the model that it was made from."""

CalibratedWeights = Mapping[tuple[str, str], CalibratedWeight]
"""Integers of weights by graph and initializer."""

_NODE_BYTES = 768
"""Most bytes that a graph grows by when a product with one weight becomes one with integers."""


@dataclass(frozen=True, slots=True)
class Integers:
    """The integers of one weight.

    Attributes:
        weight: The weight.
        level: Its level.
        scale_dtype: Stored type of its scales.
        given: The integers that a calibration has chosen; None rounds.
    """

    weight: Weight
    level: IntLevel
    scale_dtype: np.dtype[Any]
    given: CalibratedWeight | None = None

    @property
    def method(self) -> str:
        """Return how they are chosen."""
        return self.given.method if self.given else WITHOUT_DATA

    @property
    def form(self) -> str:
        """Return a key that differs from that of other integers of the same tensor."""
        how = self.weight.name if self.given else "rounded"
        return f"transposed: {self.weight.transposed}, {how}, {self.level.bits} bits"

    def round(self, piece: NDArray[Any], *, row: int = 0, column: int = 0) -> Rounded:
        """Return the integers of a piece of the weight, (rows, columns), that begins at a row and a column."""
        if self.given is not None:
            return self.given.round(piece, row, column=column, scale_dtype=self.scale_dtype, name=self.weight.name)
        return round_weight(
            piece,
            bits=self.level.bits,
            group_size=self.level.group_size,
            scale_dtype=self.scale_dtype,
            name=self.weight.name,
        )

    def zero_points(self) -> NDArray[Any] | None:
        """Return the unsigned zero points, (N, G); None where all are half of the range, which operators assume."""
        zeros = self.given.zero_points() if self.given is not None else None
        return None if zeros is None else (zeros.astype(np.int16) + (1 << (self.level.bits - 1))).astype(np.uint8)


def find_integers(
    weights: Mapping[str, Sequence[Weight]],
    graphs: Sequence[tuple[str, ir.Model]],
    calibration: Calibration,
    ctx: Context,
    *,
    but: Iterable[str] = (),
) -> CalibratedWeights:
    """Return the integers that a calibration has for the weights of graphs.

    A tied table has the embedding's name in a graph; a calibration knows it as the head's. The weights in ``but`` keep their type, so their
    integers are not used.

    Raises:
        QuantizationError: ``CALIBRATION_MISMATCH``: it is of another model than the graphs, has none of their weights, or has them in
            another shape.
    """
    for _, model in graphs:
        calibration.require_model(model.metadata_props.get(_LINEAGE, ""))
    initializers = frozenset(
        part for _, model in graphs for name in model.graph.initializers for part in _names(str(name))
    )
    integers: dict[tuple[str, str], CalibratedWeight] = {}
    used: set[str] = set()
    for graph, some in weights.items():
        for weight in some:
            names = _names(weight.name)
            given = calibration.weight(names, weight.features)
            if given is None and weight.products and weight.lookups:
                names = calibration.names_of_shape(weight.features, but=initializers)
                given = calibration.weight(names, weight.features) if len(names) == 1 else None
            if given is not None:
                integers[graph, weight.name] = given
                used.update(names)
    calibration.require_used(len(used))
    unused = sorted(calibration.names - used - {name for weight in but for name in _names(weight)})
    if unused:
        ctx.warn(
            f"{counted(len(unused), 'weight')} of the calibration, first {unused[0]!r}, cannot be told apart in the graph: "
            "they are rounded without data"
        )
    return integers


def _names(initializer: str) -> tuple[str, ...]:
    """Return the names in transformers of the weights that an initializer holds: ``q_proj+k_proj.weight.T`` holds two."""
    plain = initializer.removesuffix(_TRANSPOSED)
    path, dot, last = plain.removesuffix(_WEIGHT).rpartition(".")
    if _JOINED not in last or not plain.endswith(_WEIGHT):
        return (plain,)
    return tuple(f"{path}{dot}{part}{_WEIGHT}" for part in last.split(_JOINED))


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
            fixed += _NODE_BYTES
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
