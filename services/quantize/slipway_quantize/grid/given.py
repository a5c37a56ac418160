"""Pack integers that were chosen before, and measure what they add to a weight.

Axes: N output features, K input features, G groups of one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slipway_quantize.grid.rounding import Rounded, overflow_error, require_finite
from slipway_quantize.grid.search import Array, dequantize_groups, pack_codes


@dataclass(frozen=True, slots=True)
class Given:
    """Integers of some rows of a weight: a value is (code - zero point) · scale.

    Attributes:
        codes: int8 (N, K)
        scales: float32 (N, G)
        zero_points: int8 (N, G), or None where all are 0.
    """

    codes: Array
    scales: Array
    zero_points: Array | None

    def rounded(self, weight: Array, *, bits: int, scale_dtype: np.dtype[Any], name: str) -> Rounded:
        """Return them packed, with scales of the stored type.

        Args:
            weight: The rows that they stand for, any float type. (N, K)
            bits: Bits of a code.
            scale_dtype: Stored type of the scales.
            name: The weight's name, for errors.

        Raises:
            QuantizationError: ``NON_FINITE_WEIGHTS``, or ``WEIGHT_OVERFLOW`` if the type cannot hold a scale.
        """
        require_finite(weight, name)
        with np.errstate(over="ignore"):
            scales = self.scales.astype(scale_dtype)
        if not np.isfinite(scales).all():
            raise overflow_error(weight, scales, name)
        exact = weight.astype(np.float32)
        difference = dequantize_groups(self.codes, scales, self.zero_points)
        difference -= exact
        return Rounded(
            pack_codes(self.codes, bits=bits),
            scales,
            float(np.square(difference).sum(dtype=np.float64)),
            float(np.square(exact).sum(dtype=np.float64)),
            self.zero_points,
        )
