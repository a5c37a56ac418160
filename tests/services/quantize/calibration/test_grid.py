"""Grids of every kind that the stage offers."""

from __future__ import annotations

import pytest
import torch

from slipway_quantize.calibration.rounding.grid import Grid


def weights() -> torch.Tensor:
    made = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    made[0] = 0.0
    made[1, :16] = 5.0
    return made


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 64, 256])
def test_a_fit_is_no_worse_than_the_plain_range(bits: int, symmetric: bool, group_size: int) -> None:
    grid, weight = Grid(bits, group_size, symmetric, torch.bfloat16), weights()
    fitted = grid.fit(weight)
    codes = grid.nearest(grid.places(weight, fitted))
    assert torch.equal(fitted.scales, fitted.scales.bfloat16().float())
    assert codes.min() >= -(1 << bits - 1)
    assert codes.max() < 1 << bits - 1
    assert (fitted.zeros is None) == symmetric
    error = (grid.values(codes, fitted) - weight).square().sum()
    largest = weight.reshape(32, -1, group_size).abs().amax(-1).repeat_interleave(group_size, dim=1)
    step = largest / ((1 << bits - 1) - 1)
    plain = ((weight / step.clamp_min(1e-9)).round() * step - weight).square().sum()
    assert error <= plain * 1.02  # scales of bfloat16 cost a little at 8 bits
    assert not grid.values(codes, fitted)[0].any()


def test_weights_that_matter_are_fitted_better() -> None:
    grid, weight = Grid(3, 32, True, torch.float32), weights()
    importance = torch.where(torch.arange(256) % 32 < 4, 100.0, 1.0)

    def error(importance_given: torch.Tensor | None) -> float:
        fitted = grid.fit(weight, importance_given)
        values = grid.values(grid.nearest(grid.places(weight, fitted)), fitted)
        return float(((values - weight).square() * importance).sum())

    assert error(importance) < error(None)
