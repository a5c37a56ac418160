"""The passing on of errors, against the definition: after each column, the best change of all columns that are left."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipway_quantize.calibration.rounding.grid import Grid
from slipway_quantize.calibration.rounding.methods import DAMPING, error_factors, gptq


def moments(columns: int, *, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(4 * columns, columns, generator=torch.Generator().manual_seed(seed))
    mixed = rows @ torch.randn(columns, columns, generator=torch.Generator().manual_seed(seed + 1))
    return mixed.T @ mixed


def by_definition(
    weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray, matrix: np.ndarray, grid: Grid
) -> np.ndarray:
    """Round a column, then solve for the best change of those that are left; both by the inverse of what is left."""
    weight, codes = weight.copy(), np.empty_like(weight)
    order = np.argsort(-np.diag(matrix), kind="stable")
    damped = matrix + DAMPING * np.diag(matrix).mean() * np.eye(len(matrix))
    for place, column in enumerate(order):
        left = order[place + 1 :]
        code = weight[:, column] / scales[:, column] + zeros[:, column]
        codes[:, column] = np.clip(np.rint(code), grid.lowest, grid.highest)
        error = weight[:, column] - (codes[:, column] - zeros[:, column]) * scales[:, column]
        # min over d of the energy of (error at column, d at the columns left): d = -error · M[left, left]⁻¹ M[left, column]
        change = np.linalg.solve(damped[np.ix_(left, left)], damped[left, column]) if len(left) else np.empty(0)
        weight[:, left] += error[:, None] * change[None]
        weight[:, column] = (codes[:, column] - zeros[:, column]) * scales[:, column]
    return codes


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [32, 160])  # within a block, and over several
def test_codes_are_those_of_the_definition(columns: int, symmetric: bool) -> None:
    grid = Grid(4, 16, symmetric, torch.float32)
    weight = torch.randn(8, columns, generator=torch.Generator().manual_seed(2))
    matrix, fitted = moments(columns), grid.fit(weight)
    codes = grid.nearest(gptq(weight, fitted, grid, *error_factors(matrix)))
    zeros = torch.zeros_like(fitted.scales) if fitted.zeros is None else fitted.zeros
    scale, zero = (grid.spread(part).double().numpy() for part in (fitted.scales, zeros))
    expected = by_definition(weight.double().numpy(), scale, zero, matrix.double().numpy(), grid)
    assert (codes.numpy() == expected).mean() > 0.995  # a place in the middle of two codes may go to either
    assert not torch.equal(codes, grid.nearest(grid.places(weight, fitted)))


def test_results_are_nearer_than_those_of_rounding() -> None:
    grid = Grid(4, 32, True, torch.float32)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    matrix, fitted = moments(128), grid.fit(weight)

    def error(places: torch.Tensor) -> float:
        added = grid.values(grid.nearest(places), fitted) - weight
        return float(((added @ matrix) * added).sum())

    assert error(gptq(weight, fitted, grid, *error_factors(matrix))) < 0.6 * error(grid.places(weight, fitted))


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    grid = Grid(4, 32, True, torch.float32)
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    for matrix in (torch.zeros(64, 64), moments(64) * (torch.arange(64) < 32).outer(torch.arange(64) < 32)):
        places = gptq(weight, grid.fit(weight), grid, *error_factors(matrix))
        assert places.isfinite().all()
