"""Rounded weights: with codes that are fixed, or with places and scales that gradients move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.grid import Fitted, Grid

_BEYOND = 0.49
"""How far a place may lie beyond the grid's ends, in codes."""


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
        return self.grid.values(self.codes[rows], self.fitted.rows(rows))


class Piece:
    """Rows of a weight whose places on the grid and scales are tuned.

    Args:
        grid: The grid.
        fitted: Scales and zero points of these rows to start from.
        places: Where the weights lie on the grid. (N, K)
        like: Makes an array of zeros of a shape, for gradients and what becomes of the scales.

    Attributes:
        places: As given, at most half a code beyond the grid's ends; ``grad`` sums up its gradients.
        factors: Relative changes of the scales, which become scale · (1 + factor); as ``places``. (N, G)
    """

    def __init__(self, grid: Grid, fitted: Fitted, places: Tensor, like: Callable[[tuple[int, ...]], Tensor]) -> None:
        self.grid = grid
        self._fitted = fitted
        self.places = places.requires_grad_()
        self.factors = like(tuple(fitted.scales.shape)).requires_grad_()
        for values in (self.places, self.factors):
            values.grad = like(tuple(values.shape))
        self.limit()

    @torch.no_grad()
    def limit(self) -> None:
        """Move places beyond the grid's ends back, so that each can still become another code."""
        self.places.clamp_(self.grid.lowest - _BEYOND, self.grid.highest + _BEYOND)

    @torch.no_grad()
    def scales(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return the scales of rows as they are now, exact in their stored type."""
        return (self._fitted.scales[rows] * (1 + self.factors[rows])).to(self.grid.dtype).float()

    @torch.no_grad()
    def values(self, rows: slice | Tensor) -> Tensor:
        """Return the rounded weights of rows."""
        values = self.places[rows].round().clamp_(self.grid.lowest, self.grid.highest)
        groups = self._groups(values)
        if self._fitted.zeros is not None:
            groups.sub_(self._fitted.zeros[rows][..., None])
        groups.mul_(self.scales(rows)[..., None])
        return values

    @torch.no_grad()
    def take(self, rows: slice | Tensor, gradient: Tensor, values: Tensor) -> None:
        """Add the gradient of rows' values: that of a place passes the rounding to its code."""
        scales, before = self.scales(rows), self._fitted.scales[rows]
        groups = self._groups(gradient)
        ratio = torch.where(scales == 0, 0.0, before / torch.where(scales == 0, 1.0, scales))
        of_factors = (groups * self._groups(values)).sum(-1).mul_(ratio)
        places, factors = self.places.grad, self.factors.grad
        assert places is not None
        assert factors is not None
        if isinstance(rows, slice):
            factors[rows] += of_factors
            self._groups(places[rows]).addcmul_(groups, scales[..., None])
        else:
            factors.index_add_(0, rows, of_factors)
            places.index_add_(0, rows, (groups * scales[..., None]).reshape(gradient.shape))

    def _groups(self, values: Tensor) -> Tensor:
        return values.view(len(values), -1, self.grid.group_size)


class Tuned:
    """A weight whose places on the grid and scales are tuned.

    Args:
        pieces: Its rows; none is empty.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        counts = [len(piece.places) for piece in pieces]
        self._starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        self._anchor = torch.zeros((), requires_grad=True)

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Return rows of the weight, float32; rows that are named one by one are in ascending order."""
        if isinstance(rows, slice):
            return _Values.apply(self._anchor, self.pieces[self._starts.index(rows.start)], slice(None))
        inside = [(rows >= first) & (rows < last) for first, last in zip(self._starts, self._starts[1:], strict=False)]
        parts = [
            _Values.apply(self._anchor, self.pieces[index], rows[which] - self._starts[index])
            for index, which in enumerate(inside)
            if bool(which.any())
        ]
        return torch.cat(parts)

    @torch.no_grad()
    def fixed(self, fitted: Fitted, grid: Grid) -> Fixed:
        """Return the weight as it is now."""
        codes = torch.cat([grid.nearest(piece.places).to(torch.int8) for piece in self.pieces])
        return Fixed(grid, codes, Fitted(torch.cat([piece.scales() for piece in self.pieces]), fitted.zeros))


class _Values(torch.autograd.Function):
    """The values of a piece; their gradient is added to the piece's own, without arrays that grow with the model."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, piece: Piece, rows: slice | Tensor) -> Tensor:  # noqa: ARG004 - for the graph
        values = piece.values(rows)
        ctx.save_for_backward(values)
        ctx.piece, ctx.rows = piece, rows
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (values,) = ctx.saved_tensors
        ctx.piece.take(ctx.rows, gradients[0].contiguous(), values)
        return None, None, None
