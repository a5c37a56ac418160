"""Methods that round one layer's weight, GPTQ among them, and a correction for the roundings before a layer.

A finished block keeps what the methods left in it.

Source of GPTQ: Frantar et al., "GPTQ", arXiv 2210.17323: the inputs' columns are rounded in turn, and later ones make up for the error of
those before; columns with large inputs come first, and scales are fitted beforehand. The result is then refined: scales are fitted to the
codes by least squares over all inputs, and each code is chosen again beside all others (coordinate descent, as in Behdin et al.,
"QuantEase", arXiv 2309.01885).

Source of the correction: Li et al., "GPTAQ", arXiv 2504.02692, which rounds a weight so that its results on the inputs that
rounded layers give are near to the exact results on the exact inputs. Here the weight is corrected first and rounded then, by
GPTQ or to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.grid import Fitted, Fixed, Grid
from slipway_quantize.calibration.streaming.layers import Layer, Weight, multiply

NEAREST = "rtn"
BY_INPUTS = (NEAREST, "awq", "gptq")
"""Methods that round one layer at a time, the simplest first."""

SHARE = 0.5
"""Share of the drift that a layer makes up for; the least-squares weight would fit the noise of a text of usual length, too."""

_BLOCK_COLUMNS = 64
"""Columns whose errors are passed on to all later ones at once."""
_LEAST_CHANGE, _MOST_CHANGE = 0.8, 1.25
"""A scale that would change by more than that stays: its group says too little about it."""
DAMPING = 0.05
"""Added to the diagonal, as a share of its mean."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A layer's weight, rounded by one method.

    Attributes:
        weight: The rounded weight.
        places: Where the weights lay on the grid when GPTQ rounded them, float16; None for other methods. (N, K)
    """

    weight: Fixed
    places: Tensor | None

    def places_of(self, layer: Layer, rows: slice) -> Tensor:
        """Return where rows of the weight lay on the grid, float32."""
        if self.places is not None:
            return self.places[rows].float()
        grid, codes = self.weight.grid, self.weight.codes[rows].float()
        places = grid.places(layer.exact(rows), self.weight.fitted.rows(rows))
        # Only the codes of a corrected weight are known.
        return torch.where(grid.nearest(places) == codes, places, codes)


Candidates = tuple[dict[str, Rounded], dict[str, float]]
"""A layer's weight rounded by each method, and the relative error of its results on held-out inputs, against the corrected weight if there
is one (:class:`Corrected`)."""


def round_layer(
    weight: Weight,
    method: str,
    grid: Grid,
    moments: Tensor | None = None,
    *,
    factors: tuple[Tensor, Tensor] | None = None,
    given: Fitted | None = None,
) -> Rounded:
    """Round a layer's weight.

    Args:
        weight: The weight. (N, K)
        method: One of ``BY_INPUTS``.
        grid: The grid.
        moments: Second moments of its inputs; None for ``rtn``. (K, K)
        factors: As :func:`error_factors` returns them for the moments; for ``gptq``.
        given: Scales and zero points that are known already; ``awq`` and ``gptq`` have the same.
    """
    importance = None
    if method != NEAREST:
        assert moments is not None
        importance = moments.diagonal() + (DAMPING * float(moments.diagonal().mean()) + 1e-30)
    codes = places = None
    fitted = []
    for rows in weight.pieces:
        values = weight.exact(rows)
        if codes is None:
            shape = (weight.pieces[-1].stop, values.shape[1])
            codes = torch.empty(shape, dtype=torch.int8)
            places = torch.empty(shape, dtype=torch.float16) if method == "gptq" else None
        fitted.append(grid.fit(values, importance) if given is None else given.rows(rows))
        if method == "gptq":
            assert factors is not None
            assert moments is not None
            exact = gptq(values, fitted[-1], grid, *factors)
            stiff = damp(moments)
            fitted[-1] = refit_scales(values, exact, fitted[-1], grid, stiff)
            exact = refine_places(values, exact, fitted[-1], grid, order=factors[0], moments=stiff)
        else:
            exact = grid.places(values, fitted[-1])
        codes[rows] = grid.nearest(exact).to(torch.int8)
        if places is not None:
            places[rows] = exact.clamp(grid.lowest - 1, grid.highest + 1)
    assert codes is not None
    zeros = None if grid.symmetric else torch.cat([part.zeros for part in fitted if part.zeros is not None])
    return Rounded(Fixed(grid, codes, Fitted(torch.cat([part.scales for part in fitted]), zeros)), places)


def best_method(errors: Mapping[str, float], choices: Iterable[str]) -> str:
    """Return the method with the smallest error among the choices; ``rtn`` if none of them was tried for this layer."""
    return min((method for method in choices if method in errors), key=errors.__getitem__, default=NEAREST)


def rounded_tensors(name: str, rounded: Rounded) -> dict[str, Tensor]:
    """Return the tensors that :func:`read_rounded` reads, named ``name.codes`` and so on."""
    made = {f"{name}.codes": rounded.weight.codes, f"{name}.scales": rounded.weight.fitted.scales}
    if rounded.weight.fitted.zeros is not None:
        made[f"{name}.zeros"] = rounded.weight.fitted.zeros
    if rounded.places is not None:
        made[f"{name}.places"] = rounded.places
    return made


def read_rounded(tensors: Mapping[str, Tensor], name: str, method: str, grid: Grid) -> Rounded:
    """Return a layer's rounding by a method from a finished block; its rounding to the nearest if it has no other."""
    start = f"{name}@{method}" if f"{name}@{method}.codes" in tensors else f"{name}@{NEAREST}"
    fitted = Fitted(tensors[f"{start}.scales"], tensors.get(f"{start}.zeros"))
    codes = tensors[f"{start}.codes"]
    return Rounded(Fixed(grid, codes, fitted), tensors.get(f"{start}.places"))


def correction(drift: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Return the matrix A by which a weight W is corrected to W + W · A: a share of D · M⁻¹ (K, K).

    Args:
        drift: D: sums of the products of the exact inputs minus the inputs (rows) with the inputs (columns). (K, K)
        order: Order of the columns, as :func:`error_factors` returns it.
        factors: As returned with it: the upper Cholesky factor of the inverse of the inputs' damped second moments M.
    """
    matrix = torch.empty_like(drift)
    matrix[:, order] = multiply(multiply(drift[:, order].contiguous(), factors), factors.T.contiguous()).mul_(SHARE)
    return matrix


class Corrected:
    """A layer's weight, changed so that its results make up for a share of the drift of its inputs.

    Args:
        weight: The layer's own weight. (N, K)
        change: As :func:`correction` returns it. (K, K)
    """

    def __init__(self, weight: Weight, change: Tensor) -> None:
        self._weight = weight
        self._change = change.T.contiguous()

    @property
    def pieces(self) -> tuple[slice, ...]:
        """The rows that are worked on at once."""
        return self._weight.pieces

    def exact(self, rows: slice) -> Tensor:
        """Return rows of the corrected weight in float32."""
        own = self._weight.exact(rows)
        return own + multiply(own, self._change)


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
    for start in range(0, weight.shape[1], _BLOCK_COLUMNS):
        end = min(start + _BLOCK_COLUMNS, weight.shape[1])
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


def refit_scales(weight: Tensor, places: Tensor, fitted: Fitted, grid: Grid, moments: Tensor) -> Fitted:
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


def refine_places(
    weight: Tensor, places: Tensor, fitted: Fitted, grid: Grid, *, order: Tensor, moments: Tensor
) -> Tensor:
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
    for start in range(0, weight.shape[1], _BLOCK_COLUMNS):
        end = min(start + _BLOCK_COLUMNS, weight.shape[1])
        changes = torch.empty(len(weight), end - start)
        for column in range(start, end):
            place = codes[:, column] + slopes[:, column] * (inverse[:, column] / moments[column, column])
            better[:, order[column]] = place
            change = (grid.nearest(place) - codes[:, column]) * scales[:, column]
            slopes[:, column + 1 : end] -= change[:, None] * moments[column, column + 1 : end]
            changes[:, column - start] = change
        slopes[:, end:] -= changes @ moments[start:end, end:]
    return better
