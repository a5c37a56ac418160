"""Numbers of bits: parameters take those of a level, and rounding takes any."""

from __future__ import annotations

import numpy as np
import pytest

from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.grid.rounding import round_weight
from slipway_quantize.grid.search import dequantize_groups, quantize_groups
from slipway_quantize.params import QuantizeParams

FLOAT32 = np.dtype(np.float32)


def test_a_width_that_no_level_has_is_refused_with_those_that_are() -> None:
    for refused in (5, 0, 16):
        with pytest.raises(ValueError, match=f"{refused} is no width of integers; use 3, 4 or 8"):
            CalibrateParams(bits=refused)
        with pytest.raises(ValueError, match=f"{refused} is no width of integers; use 3, 4 or 8"):
            QuantizeParams(format="pytorch", level="int4", head_bits=refused)
    assert CalibrateParams(bits=3).bits == 3


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_rounding_takes_any_width_compiled_or_not(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 96), np.float32)
    rounded = round_weight(weight, bits=bits, group_size=32, scale_dtype=FLOAT32, name="w")
    codes, scales = quantize_groups(weight, bits=bits, group_size=32, scale_dtype=FLOAT32)
    assert np.array_equal(rounded.values(bits), dequantize_groups(codes, scales))
