"""Find the integers of a graph's weights in a calibration, or round them.

Axes: N output features (or tokens), K input features, G groups of one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.counts import counted
from slipway.stage import Context
from slipway_quantize.calibrated import WITHOUT_DATA, CalibratedWeight, Calibration
from slipway_quantize.graphs.weights import Weight
from slipway_quantize.grid.rounding import Rounded, round_weight
from slipway_quantize.levels import IntLevel

_TRANSPOSED, _WEIGHT = ".T", ".weight"
"""Ends of an initializer's name (docs/onnx.md, "Form of the weights")."""
_JOINED = "+"
_LINEAGE = "lineage"
"""Property of a graph: the digest of the model that it was made from."""

CalibratedWeights = Mapping[tuple[str, str], CalibratedWeight]
"""Integers of weights by graph and initializer."""


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
