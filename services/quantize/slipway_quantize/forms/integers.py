"""Integers of 3, 4 or 8 bits with a scale per group, packed into words (``pack-quantized``).

Axes: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.models.dtypes import numpy_dtypes
from slipway_quantize.calibrated import CalibratedWeight
from slipway_quantize.forms.form import Form, Part, StoredRows
from slipway_quantize.grid.rounding import round_weight
from slipway_quantize.grid.search import pack_words
from slipway_quantize.levels import IntLevel
from slipway_quantize.reading.tensors import DTYPE_NAMES, as_array


class PackedIntegers(Form):
    """Integers, chosen by a calibration or rounded to the nearest.

    Args:
        level: Bits and groups.
        scale_dtype: Type of the scales.
        calibrated: Integers that a calibration has chosen, by module.
        asymmetric: Whether every weight has zero points.
    """

    format = "pack-quantized"

    def __init__(
        self,
        level: IntLevel,
        *,
        scale_dtype: torch.dtype,
        calibrated: Mapping[str, CalibratedWeight],
        asymmetric: bool,
    ) -> None:
        self._level = level
        self._scales = DTYPE_NAMES[scale_dtype]
        self._calibrated = calibrated
        self._asymmetric = asymmetric
        self.dequantize = (
            asymmetric  # compressed-tensors 0.20 expects unpacked zero points in a model that it unpacks later
        )
        self.weights = {
            "num_bits": level.bits,
            "type": "int",
            "symmetric": not asymmetric,
            "strategy": "group",
            "group_size": level.group_size,
            "dynamic": False,
        }

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """As :meth:`Form.parts`."""
        (rows, columns), bits = shape, self._level.bits
        groups = columns // self._level.group_size
        parts: dict[str, Part] = {
            "weight_packed": ("I32", (rows, columns * bits // 32)),
            "weight_scale": (self._scales, (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        return parts | ({"weight_zero_point": ("I32", (-(-rows * bits // 32), groups))} if self._asymmetric else {})

    def whole(self, module: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        """As :meth:`Form.whole`: the shape, and zero points, which are packed along the rows and 0 for a weight without."""
        found: dict[str, NDArray[Any]] = {"weight_shape": np.array(shape, np.int64)}
        if self._asymmetric:
            given = self._calibrated.get(module)
            zeros = given.zero_points() if given is not None else None
            if zeros is None:
                zeros = np.zeros((shape[0], shape[1] // self._level.group_size), np.int8)
            found["weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T, bits=self._level.bits).T)
        return found

    def rounded(self, weight: Tensor, row: int, *, module: str, name: str) -> StoredRows:
        """As :meth:`Form.rounded`."""
        level, scale_dtype = self._level, numpy_dtypes(self._scales)[self._scales]
        given, exact = self._calibrated.get(module), as_array(weight)
        if given is not None:
            found = given.round(exact, row, scale_dtype=scale_dtype, name=f"{module}.weight")
        else:
            found = round_weight(
                exact, bits=level.bits, group_size=level.group_size, scale_dtype=scale_dtype, name=name
            )
        parts = {"weight_packed": found.packed, "weight_scale": found.scales}
        return StoredRows(parts, lambda: torch.from_numpy(found.values(level.bits)), (found.error, found.energy))
