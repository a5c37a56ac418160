"""The grid: exact where it can be, better than plain rounding where it cannot, and packed as the formats define."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_quantize.grid.search import dequantize_groups, pack_codes, quantize_groups, unpack_codes

FLOAT32 = np.dtype(np.float32)


def plain_rounding(weight: np.ndarray, bits: int, group: int) -> np.ndarray:
    """The textbook quantizer: scale = max(abs) / (2**(bits - 1) - 1)."""
    limit = 2 ** (bits - 1) - 1
    groups = weight.reshape(weight.shape[0], -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) / limit
    return (np.clip(np.rint(groups / scale), -limit - 1, limit) * scale).reshape(weight.shape)


def random(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


@pytest.mark.parametrize(("bits", "gain"), [(4, 0.72), (5, 0.95), (6, 1.0), (8, 1.0)])
def test_error_is_below_plain_rounding(bits: int, gain: float) -> None:
    weight = random(256, 256)
    codes, scales = quantize_groups(weight, bits=bits, group_size=32, scale_dtype=FLOAT32)
    ours = np.square(dequantize_groups(codes, scales) - weight).sum()
    plain = np.square(plain_rounding(weight, bits, 32) - weight).sum()
    assert ours < gain * plain


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_weights_on_a_grid_survive_exactly(bits: int) -> None:
    limit = 1 << (bits - 1)
    codes = np.random.default_rng(0).integers(-limit, limit, (64, 64))
    codes[:, ::32] = -limit  # every group reaches the end of the grid
    weight = (codes * 0.125).astype(np.float32)
    found, scales = quantize_groups(weight, bits=bits, group_size=32, scale_dtype=FLOAT32)
    assert np.array_equal(dequantize_groups(found, scales), weight)


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_zero_and_tiny_groups_become_zero_and_stay_finite(scale_dtype: type) -> None:
    weight = np.zeros((3, 32), np.float32)
    weight[1] = 1e-42
    weight[2] = 1e-9
    codes, scales = quantize_groups(weight, bits=4, group_size=32, scale_dtype=np.dtype(scale_dtype))
    rounded = dequantize_groups(codes, scales)
    assert np.isfinite(rounded).all()
    assert np.abs(rounded - weight).max() < 1e-8


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    bits=st.sampled_from([4, 5, 8]),
    group=st.sampled_from([16, 32]),
    seed=st.integers(0, 1000),
    magnitude=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_error_of_each_weight_is_bounded_by_the_step(
    rows: int, groups: int, bits: int, group: int, seed: int, magnitude: float
) -> None:
    weight = random(rows, groups * group, seed) * np.float32(magnitude)
    codes, scales = quantize_groups(weight, bits=bits, group_size=group, scale_dtype=FLOAT32)
    limit = 1 << (bits - 1)
    assert -limit <= int(codes.min()) <= int(codes.max()) < limit
    error = np.abs(dequantize_groups(codes, scales) - weight)
    step = np.abs(scales).repeat(group, 1)
    # Half a step inside the grid; the ends of a group may be cut off, by two steps at the very most.
    assert (error <= 2 * step).all()
    inside = (codes > -limit) & (codes < limit - 1)
    assert (error[inside] <= (0.51 * step)[inside]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_that_of_compressed_tensors(bits: int) -> None:
    limit = 1 << (bits - 1)
    codes = np.random.default_rng(0).integers(-limit, limit, (7, 96)).astype(np.int8)
    packed = pack_codes(codes, bits=bits)
    assert np.array_equal(packed.view(np.int32), pack_to_int32(torch.from_numpy(codes), bits).numpy())
    assert np.array_equal(unpack_codes(packed, bits=bits), codes)
