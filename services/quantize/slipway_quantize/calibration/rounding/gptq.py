"""GPTQ: round the inputs' columns in turn, and let later ones make up for the error of those before.

Source: Frantar et al., "GPTQ", arXiv 2210.17323; columns with large inputs first, and scales fitted beforehand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.grid import Fitted, Grid

_BLOCK = 64
"""Columns whose errors are passed on to all later ones at once."""
DAMPING = 0.01
"""Added to the diagonal, as a share of its mean."""


def error_factors(moments: Tensor, *, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    """Return the order in which columns are rounded, and the factors by which errors are passed on.

    Args:
        moments: Second moments of the inputs, finite. (K, K)
        damping: Share of the diagonal's mean that is added to it.

    Returns:
        The order (K), and the upper Cholesky factor (K, K) of the inverse of the ordered, damped moments.
    """
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    matrix = moments[order][:, order].double()
    mean = float(matrix.diagonal().mean()) or 1.0
    while True:
        matrix.diagonal().add_(damping * mean)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed:
            return order, upper.float()
        damping *= 10  # the inputs hardly vary in some directions


def gptq(weight: Tensor, fitted: Fitted, grid: Grid, order: Tensor, factors: Tensor) -> Tensor:
    """Return the places (N, K) of weights on the grid when they were rounded: the code of each is the nearest.

    Args:
        weight: float32. (N, K)
        fitted: Scales and zero points.
        grid: The grid.
        order: As :func:`error_factors` returns it, like ``factors``.
        factors: (K, K)
    """
    places = torch.empty_like(weight)
    left = weight[:, order].contiguous()  # what is left to represent, errors so far included
    scales = grid.spread(fitted.scales)[:, order]
    zeros = None if fitted.zeros is None else grid.spread(fitted.zeros)[:, order]
    inverse = torch.where(scales == 0, 0.0, 1 / torch.where(scales == 0, 1.0, scales))
    for start in range(0, weight.shape[1], _BLOCK):
        end = min(start + _BLOCK, weight.shape[1])
        errors = torch.empty(len(weight), end - start)
        for column in range(start, end):
            place = left[:, column] * inverse[:, column]
            zero = 0.0 if zeros is None else zeros[:, column]
            code = grid.nearest(place + zero)
            places[:, order[column]] = place + zero
            error = (left[:, column] - (code - zero) * scales[:, column]) / factors[column, column]
            left[:, column + 1 : end] -= error[:, None] * factors[column, column + 1 : end]
            errors[:, column - start] = error
        left[:, end:] -= errors @ factors[start:end, end:]
    return places
