"""GPTQ: round the inputs' columns in turn, and let later ones make up for the error of those before.

Source: Frantar et al., "GPTQ", arXiv 2210.17323; columns with large inputs first, and scales fitted beforehand. The result is then
refined: scales are fitted to the codes by least squares over all inputs, and each code is chosen again beside all others (coordinate
descent, as in Behdin et al., "QuantEase", arXiv 2309.01885).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.grid import Fitted, Grid

_BLOCK = 64
"""Columns whose errors are passed on to all later ones at once."""
_LEAST_CHANGE, _MOST_CHANGE = 0.8, 1.25
"""A scale that would change by more than that stays: its group says too little about it."""
DAMPING = 0.05
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
    """Round a weight; return the place (N, K) of each element on the grid when it was rounded: its code is the nearest.

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


def damp(moments: Tensor, *, damping: float = DAMPING) -> Tensor:
    """Return second moments of inputs (K, K) with a share of their mean added to the diagonal, so that no direction is free."""
    stiff = moments.clone()
    stiff.diagonal().add_(damping * (float(moments.diagonal().mean()) or 1.0))
    return stiff


def refit(weight: Tensor, places: Tensor, fitted: Fitted, grid: Grid, moments: Tensor) -> Fitted:
    """Return the scales whose results on the inputs are nearest to the weight's, for the codes of given places.

    Args:
        weight: float32. (N, K)
        places: As :func:`gptq` returns them. (N, K)
        fitted: Scales and zero points so far.
        grid: The grid.
        moments: As :func:`damp` returns them. (K, K)
    """
    codes = grid.nearest(places)
    if fitted.zeros is not None:
        codes = codes - grid.spread(fitted.zeros)
    groups = weight.shape[1] // grid.group_size
    wanted = (codes * (weight @ moments)).view(len(weight), groups, -1).sum(-1)
    products = torch.empty(len(weight), groups, groups)
    for group in range(groups):
        columns = slice(group * grid.group_size, (group + 1) * grid.group_size)
        products[:, group] = ((codes[:, columns] @ moments[columns]) * codes).view(len(weight), groups, -1).sum(-1)
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + 1e-30
    scales, failed = torch.linalg.solve_ex(products, wanted)
    scales = scales.to(grid.dtype).float()
    ratio = scales / torch.where(fitted.scales == 0, 1.0, fitted.scales)
    near = (ratio > _LEAST_CHANGE) & (ratio < _MOST_CHANGE) & (failed == 0)[:, None]
    return Fitted(torch.where(near, scales, fitted.scales), fitted.zeros)


def descend(weight: Tensor, places: Tensor, fitted: Fitted, grid: Grid, *, order: Tensor, moments: Tensor) -> Tensor:
    """Choose each code once in turn, as the best beside all others; return the places of all (N, K).

    Args:
        weight: float32. (N, K)
        places: Where the weights lie so far. (N, K)
        fitted: Scales and zero points.
        grid: The grid.
        order: Order of the columns. (K)
        moments: As :func:`damp` returns them. (K, K)
    """
    moments = moments[order][:, order]
    better = torch.empty_like(places)
    codes = grid.nearest(places[:, order])
    scales = grid.spread(fitted.scales)[:, order]
    values = (codes if fitted.zeros is None else codes - grid.spread(fitted.zeros)[:, order]) * scales
    inverse = torch.where(scales == 0, 0.0, 1 / torch.where(scales == 0, 1.0, scales))
    slopes = (weight[:, order] - values) @ moments
    for start in range(0, weight.shape[1], _BLOCK):
        end = min(start + _BLOCK, weight.shape[1])
        changes = torch.empty(len(weight), end - start)
        for column in range(start, end):
            place = codes[:, column] + slopes[:, column] * (inverse[:, column] / moments[column, column])
            better[:, order[column]] = place
            change = (grid.nearest(place) - codes[:, column]) * scales[:, column]
            slopes[:, column + 1 : end] -= change[:, None] * moments[column, column + 1 : end]
            changes[:, column - start] = change
        slopes[:, end:] -= changes @ moments[start:end, end:]
    return better
