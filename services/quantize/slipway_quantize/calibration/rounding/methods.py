"""Methods that round one layer's weight, what they leave in a finished block, and a correction for the roundings before a layer.

Source of the correction: Li et al., "GPTAQ", arXiv 2504.02692, which rounds a weight so that its results on the inputs that
rounded layers give are near to the exact results on the exact inputs. Here the weight is corrected first and rounded then, by
GPTQ or to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.gptq import DAMPING, damp, descend, gptq, refit
from slipway_quantize.calibration.rounding.grid import Fitted, Grid
from slipway_quantize.calibration.rounding.roundings import Fixed
from slipway_quantize.calibration.streaming.layers import Layer, Weight, multiply

NEAREST = "rtn"
BY_INPUTS = (NEAREST, "awq", "gptq")
"""Methods that round one layer at a time, the simplest first."""

SHARE = 0.5
"""Share of the drift that a layer makes up for; the least-squares weight would fit the noise of a text of usual length, too."""


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
        factors: As :func:`~slipway_quantize.calibration.rounding.gptq.error_factors` returns them for the moments; for ``gptq``.
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
            fitted[-1] = refit(values, exact, fitted[-1], grid, stiff)
            exact = descend(values, exact, fitted[-1], grid, order=factors[0], moments=stiff)
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
        order: Order of the columns, as :func:`~slipway_quantize.calibration.rounding.gptq.error_factors` returns it.
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
