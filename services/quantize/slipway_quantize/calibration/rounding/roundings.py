"""Rounded weights: with codes that are fixed, or with places and scales that gradients move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.grid import Fitted, Grid


@dataclass(frozen=True, slots=True)
class Fixed:
    """A weight with fixed codes.

    Attributes:
        grid: Its grid.
        codes: int8. (N, K)
        fitted: Scales and zero points.
    """

    grid: Grid
    codes: Tensor
    fitted: Fitted

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Return rows of the weight, float32."""
        zeros = self.fitted.zeros
        part = Fitted(self.fitted.scales[rows], None if zeros is None else zeros[rows])
        return self.grid.values(self.codes[rows], part)


class Tuned:
    """A weight whose places on the grid and scales are tuned.

    Args:
        grid: Its grid.
        fitted: Scales and zero points to start from.
        places: Where the weights lie on the grid, for each piece of rows; they receive gradients.

    Attributes:
        places: As given.
        factors: Logarithm-like changes of the scales, which become scale · (1 + factor), for each piece.
    """

    def __init__(self, grid: Grid, fitted: Fitted, places: Sequence[Tensor]) -> None:
        self.grid = grid
        self.fitted = fitted
        self.places = [piece.requires_grad_() for piece in places]
        counts = [len(piece) for piece in places]
        self._starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        groups = fitted.scales.shape[1]
        self.factors = [torch.zeros(count, groups).requires_grad_() for count in counts]

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Return rows of the weight, float32; rows that are named one by one are in ascending order."""
        if isinstance(rows, slice):
            return self._piece(self._starts.index(rows.start), slice(None))
        inside = [(rows >= first) & (rows < last) for first, last in zip(self._starts, self._starts[1:], strict=False)]
        parts = [
            self._piece(index, rows[which] - self._starts[index])
            for index, which in enumerate(inside)
            if bool(which.any())
        ]
        return torch.cat(parts)

    def _piece(self, index: int, rows: slice | Tensor) -> Tensor:
        lines = slice(self._starts[index], self._starts[index + 1])
        zeros = None if self.fitted.zeros is None else self.fitted.zeros[lines][rows]
        codes = _Nearest.apply(self.places[index][rows], self.grid.lowest, self.grid.highest)
        scales = _Stored.apply(self.fitted.scales[lines][rows] * (1 + self.factors[index][rows]), self.grid.dtype)
        return self.grid.values(codes, Fitted(scales, zeros))

    @torch.no_grad()
    def fixed(self) -> Fixed:
        """Return the weight as it is now."""
        codes = torch.cat([self.grid.nearest(piece).to(torch.int8) for piece in self.places])
        scales = (self.fitted.scales * (1 + torch.cat(self.factors))).to(self.grid.dtype).float()
        return Fixed(self.grid, codes, Fitted(scales, self.fitted.zeros))


class _Nearest(torch.autograd.Function):
    """Rounding to codes; the gradient passes where a place is not beyond the grid's ends."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, lowest: int, highest: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.ends = lowest - 1, highest + 1
        return places.round().clamp(lowest, highest)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (places,) = ctx.saved_tensors
        low, high = ctx.ends
        return gradients[0] * ((places > low) & (places < high)), None, None


class _Stored(torch.autograd.Function):
    """Rounding to the stored type; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG004 - torch gives it
        return values.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004 - torch gives it
        return gradients[0], None
