"""The grid: exact where it can be, better than plain rounding where it cannot, and packed as the formats define."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_quantize.grid import dequantize_groups, pack_codes, quantize_groups


def plain_rounding(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The textbook quantizer: scale = max(abs) / (2**(bits - 1) - 1)."""
    limit = 2 ** (bits - 1) - 1
    groups = weight.view(weight.shape[0], -1, group)
    scale = groups.abs().amax(-1, keepdim=True) / limit
    return ((groups / scale).round().clamp(-limit - 1, limit) * scale).view_as(weight)


@pytest.mark.parametrize(("bits", "gain"), [(4, 0.72), (8, 1.0)])
def test_error_is_below_plain_rounding(bits: int, gain: float) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_groups(weight, bits=bits, group_size=32, scale_dtype=torch.float32)
    ours = (dequantize_groups(codes, scales) - weight).square().sum()
    plain = (plain_rounding(weight, bits, 32) - weight).square().sum()
    assert ours < gain * plain


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_on_a_grid_survive_exactly(bits: int) -> None:
    limit = 1 << (bits - 1)
    codes = torch.randint(-limit, limit, (64, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::32] = -limit  # every group reaches the end of the grid
    weight = codes.float() * 0.125
    found, scales = quantize_groups(weight, bits=bits, group_size=32, scale_dtype=torch.float32)
    assert torch.equal(dequantize_groups(found, scales), weight)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_and_tiny_groups_become_zero_and_stay_finite(scale_dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 32)
    weight[1] = 1e-42
    weight[2] = 1e-9
    codes, scales = quantize_groups(weight, bits=4, group_size=32, scale_dtype=scale_dtype)
    rounded = dequantize_groups(codes, scales)
    assert torch.isfinite(rounded).all()
    assert (rounded - weight).abs().max() < 1e-8


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32]),
    seed=st.integers(0, 1000),
    magnitude=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_error_of_each_weight_is_bounded_by_the_step(
    rows: int, groups: int, bits: int, group: int, seed: int, magnitude: float
) -> None:
    weight = torch.randn(rows, groups * group, generator=torch.Generator().manual_seed(seed)) * magnitude
    codes, scales = quantize_groups(weight, bits=bits, group_size=group, scale_dtype=torch.float32)
    limit = 1 << (bits - 1)
    assert -limit <= int(codes.min()) <= int(codes.max()) < limit
    error = (dequantize_groups(codes, scales) - weight).abs().view(rows, groups, group)
    # Half a step inside the grid; the ends of a group may be cut off, by two steps at the very most.
    assert (error <= 2 * scales.abs().unsqueeze(-1)).all()
    inside = (codes.int() > -limit) & (codes.int() < limit - 1)
    assert (error.view_as(codes)[inside] <= (0.51 * scales.abs()).repeat_interleave(group, 1)[inside]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_that_of_compressed_tensors(bits: int) -> None:
    limit = 1 << (bits - 1)
    codes = torch.randint(-limit, limit, (7, 96), dtype=torch.int8)
    assert torch.equal(pack_codes(codes, bits=bits).view(torch.int32), pack_to_int32(codes, bits))
