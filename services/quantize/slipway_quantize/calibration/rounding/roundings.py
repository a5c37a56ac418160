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
        like: Makes an array of zeros of a shape, for values and gradients.
        members: Number of threads that compute gradients.

    Attributes:
        places: As given, at most half a code beyond the grid's ends.
        factors: Relative changes of the scales, which become scale · (1 + factor); as ``places``. (N, G)
        values: The rounded weights. (N, K)
        gradients: By member, the sum of the gradients of the values. The first becomes that of the places. (N, K)
    """

    def __init__(
        self, grid: Grid, fitted: Fitted, places: Tensor, like: Callable[[tuple[int, ...]], Tensor], members: int = 1
    ) -> None:
        self.grid = grid
        self._fitted = fitted
        shape = tuple(places.shape)
        self.gradients = [like(shape) for _ in range(members)]
        self.places = places.requires_grad_()
        self.places.grad = self.gradients[0]
        self.factors = like(tuple(fitted.scales.shape)).requires_grad_()
        self.factors.grad = like(tuple(fitted.scales.shape))
        self.values = like(shape)
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Move places beyond the grid's ends back, so that each can still become another code, and recompute the values."""
        self.places.clamp_(self.grid.lowest - _BEYOND, self.grid.highest + _BEYOND)
        torch.round(self.places, out=self.values)
        self.values.clamp_(self.grid.lowest, self.grid.highest)
        groups = self._groups(self.values)
        if self._fitted.zeros is not None:
            groups.sub_(self._fitted.zeros[..., None])
        groups.mul_(self.scales()[..., None])

    @torch.no_grad()
    def scales(self) -> Tensor:
        """Return the scales as they are now, exact in their stored type."""
        return (self._fitted.scales * (1 + self.factors)).to(self.grid.dtype).float()

    @torch.no_grad()
    def divide(self) -> None:
        """Divide the gradients of the values among places and scales; gradients of places ignore the rounding to codes."""
        total, factors = self.places.grad, self.factors.grad
        assert total is not None
        assert factors is not None
        for other in self.gradients[1:]:
            total.add_(other)
            other.zero_()
        scales, groups = self.scales(), self._groups(total)
        ratio = torch.where(scales == 0, 0.0, self._fitted.scales / torch.where(scales == 0, 1.0, scales))
        factors.copy_((groups * self._groups(self.values)).sum(-1).mul_(ratio))
        groups.mul_(scales[..., None])

    def _groups(self, values: Tensor) -> Tensor:
        return values.view(len(values), -1, self.grid.group_size)


class Tuned:
    """A weight whose places on the grid and scales are tuned.

    Args:
        pieces: Its rows; none is empty.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def of(self, member: int) -> Share:
        """Return the weight as a member computes with it."""
        return Share(self.pieces, member)

    @torch.no_grad()
    def to_fixed(self, fitted: Fitted, grid: Grid) -> Fixed:
        """Return the weight as it is now."""
        codes = torch.cat([grid.nearest(piece.places).to(torch.int8) for piece in self.pieces])
        return Fixed(grid, codes, Fitted(torch.cat([piece.scales() for piece in self.pieces]), fitted.zeros))


class Share:
    """A tuned weight as one member computes with it: the gradients are added to arrays of its own.

    Args:
        pieces: The weight's rows.
        member: Number of the member.
    """

    def __init__(self, pieces: Sequence[Piece], member: int) -> None:
        self._pieces = pieces
        self._member = member
        counts = [len(piece.places) for piece in pieces]
        self._starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        self._anchor = torch.zeros((), requires_grad=True)

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Return rows of the weight, float32; rows that are named one by one are in ascending order."""
        if isinstance(rows, slice):
            return self._values(self._starts.index(rows.start), slice(None))
        inside = [(rows >= first) & (rows < last) for first, last in zip(self._starts, self._starts[1:], strict=False)]
        parts = [
            self._values(index, rows[which] - self._starts[index])
            for index, which in enumerate(inside)
            if bool(which.any())
        ]
        return torch.cat(parts)

    def _values(self, index: int, rows: slice | Tensor) -> Tensor:
        piece = self._pieces[index]
        made: Tensor = _Values.apply(self._anchor, piece.values, piece.gradients[self._member], rows)  # type: ignore[no-untyped-call]
        return made


class _Values(torch.autograd.Function):
    """Values of a piece; their gradient is added to an array of the member, without others that grow with the model."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, gradient: Tensor, rows: slice | Tensor) -> Tensor:  # noqa: ARG004 - for the graph
        ctx.gradient, ctx.rows = gradient, rows
        return values.detach()[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if isinstance(ctx.rows, slice):
            ctx.gradient[ctx.rows].add_(gradients[0])
        else:
            ctx.gradient.index_add_(0, ctx.rows, gradients[0])
        return None, None, None, None
