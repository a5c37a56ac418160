"""Integers with a scale per group, packed into words (``pack-quantized``). Imports no torch.

Axes: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.model.dtypes import numpy_dtypes
from slipway_quantize.calibrated import CalibratedWeight
from slipway_quantize.forms.form import Form, Part, StoredRows
from slipway_quantize.grid.rounding import round_weight
from slipway_quantize.grid.search import pack_words
from slipway_quantize.levels import IntLevel


class PackedIntegers(Form):
    """Integers, chosen by a calibration or rounded to the nearest.

    Args:
        level: Bits and groups.
        scale_dtype: Type of the scales, by its name in a safetensors header.
        calibrated: Integers that a calibration has chosen, by module.
        asymmetric: Whether weights of the level's own bits have zero points; wider ones have none.
        bits: Bits of weights, by module; the others have those of their calibration, or of the level.

    Attributes:
        level: As above.
        calibrated: As above, without weights that get other bits than their integers have.
    """

    format = "pack-quantized"

    def __init__(
        self,
        level: IntLevel,
        *,
        scale_dtype: str,
        calibrated: Mapping[str, CalibratedWeight],
        asymmetric: bool,
        bits: Mapping[str, int] | None = None,
    ) -> None:
        self.level = level
        own = {module: given.bits for module, given in calibrated.items()} | dict(bits or {})
        self._bits = {module: width for module, width in own.items() if width != level.bits}
        self.calibrated = {module: given for module, given in calibrated.items() if given.bits == own[module]}
        self._scale_dtype = scale_dtype
        self._asymmetric = asymmetric
        # compressed-tensors 0.20 expects unpacked zero points in a model that it unpacks later.
        self.dequantize = asymmetric
        self.weights = self._weights(level.bits)

    @property
    def bits(self) -> Mapping[str, int]:
        """Bits of the weights whose bits differ from the level's, by module."""
        return self._bits

    def with_bits(self, bits: Mapping[str, int]) -> PackedIntegers:
        """Return this form with other bits for some weights, by module."""
        return PackedIntegers(
            self.level,
            scale_dtype=self._scale_dtype,
            calibrated=self.calibrated,
            asymmetric=self._asymmetric,
            bits=bits,
        )

    def schemes(self) -> list[tuple[list[str], Mapping[str, Any]]]:
        """As :meth:`Form.schemes`: weights of other bits are named, because a layer takes its most exact target.

        The widest come first, because compressed-tensors warns of a name that follows a class it matches too.
        """
        targets = {self.level.bits: ["Linear"]}
        for module, bits in sorted(self._bits.items()):
            targets.setdefault(bits, []).append(module)
        return [(named, self._weights(bits)) for bits, named in sorted(targets.items(), reverse=True)]

    def _weights(self, bits: int) -> dict[str, Any]:
        return {
            "num_bits": bits,
            "type": "int",
            "symmetric": not self._has_zeros(bits),
            "strategy": "group",
            "group_size": self.level.group_size,
            "dynamic": False,
        }

    def _has_zeros(self, bits: int) -> bool:
        return self._asymmetric and bits == self.level.bits

    def parts(self, module: str, shape: tuple[int, ...]) -> dict[str, Part]:
        """As :meth:`Form.parts`."""
        (rows, columns), bits = shape, self._bits.get(module, self.level.bits)
        groups = columns // self.level.group_size
        parts: dict[str, Part] = {
            "weight_packed": ("I32", (rows, columns * bits // 32)),
            "weight_scale": (self._scale_dtype, (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        return parts | (
            {"weight_zero_point": ("I32", (-(-rows * bits // 32), groups))} if self._has_zeros(bits) else {}
        )

    def whole(self, module: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        """As :meth:`Form.whole`: the shape, and zero points, which are packed along the rows and 0 for a weight without."""
        parts: dict[str, NDArray[Any]] = {"weight_shape": np.array(shape, np.int64)}
        if self._has_zeros(bits := self._bits.get(module, self.level.bits)):
            given = self.calibrated.get(module)
            zeros = given.zero_points() if given is not None else None
            if zeros is None:
                zeros = np.zeros((shape[0], shape[1] // self.level.group_size), np.int8)
            parts["weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T, bits=bits).T)
        return parts

    def round_rows(self, weight: NDArray[Any], row: int, *, module: str, name: str) -> StoredRows:
        """As :meth:`Form.round_rows`."""
        bits, scale_dtype = self._bits.get(module, self.level.bits), numpy_dtypes(self._scale_dtype)[self._scale_dtype]
        given = self.calibrated.get(module)
        if given is not None:
            rows = given.round(weight, row, scale_dtype=scale_dtype, name=f"{module}.weight")
        else:
            rows = round_weight(weight, bits=bits, group_size=self.level.group_size, scale_dtype=scale_dtype, name=name)
        parts = {"weight_packed": rows.packed, "weight_scale": rows.scales}
        return StoredRows(parts, partial(rows.values, bits), (rows.error, rows.energy))
