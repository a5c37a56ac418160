"""Grids of small integers, and weights rounded to them: with fixed codes, or with places that gradients move.

Axes: N output features, K input features, G groups of one row (K = G · group size). A value is (code - zero point) · scale; codes and
zero points are signed integers of the grid's bits. A symmetric grid has no zero points, and scales of either sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SMALLEST_SCALE = 1e-37
"""Its inverse is still a float32."""
_WIDEST, _NARROWEST, _TRIED = 1.15, 0.7, 19
"""Tried ranges, relative to the one that just reaches a group's extremes: a narrower one clips these and may fit all others better."""
_BLOCK_WEIGHTS = 1 << 17
"""Weights that are fitted at once: their intermediate values stay in the processor's cache."""

_BEYOND = 0.49
"""How far a place may lie beyond the grid's ends, in codes."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Scales and zero points of a weight.

    Attributes:
        scales: float32 values that ``Grid.dtype`` holds exactly. (N, G)
        zeros: Zero points as float32; None for a symmetric grid. (N, G)
    """

    scales: Tensor
    zeros: Tensor | None

    def rows(self, rows: slice | Tensor) -> Fitted:
        """Return the scales and zero points of some rows."""
        return Fitted(self.scales[rows], None if self.zeros is None else self.zeros[rows])


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid.

    Attributes:
        bits: Bits of a code.
        group_size: Weights per scale.
        symmetric: Whether there are no zero points.
        dtype: Stored type of scales.
    """

    bits: int
    group_size: int
    symmetric: bool
    dtype: torch.dtype

    @property
    def lowest(self) -> int:
        """The smallest code."""
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Fitted:
        """Fit scales and zero points so that the weighted squares of the rounding errors are small.

        Args:
            weight: float32. (N, K)
            importance: Weight of each input's errors; None weights all alike. (K)
        """
        step = max(1, _BLOCK_WEIGHTS // weight.shape[1])
        parts = [self._fit(weight[start : start + step], importance) for start in range(0, len(weight), step)]
        zeros = None if self.symmetric else torch.cat([zero for _, zero in parts])
        return Fitted(torch.cat([scale for scale, _ in parts]), zeros)

    def _fit(self, weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
        groups = weight.reshape(len(weight), -1, self.group_size)  # (N, G, group)
        shares = torch.ones_like(groups[:1]) if importance is None else importance.reshape(1, -1, self.group_size)
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        best = torch.full_like(low, torch.inf)
        scales, zeros = torch.zeros_like(low), torch.zeros_like(low)
        for factor in torch.linspace(_NARROWEST, _WIDEST, _TRIED).tolist() if self.bits < 8 else (1.0,):
            if self.symmetric:  # the sign puts the largest weight on the longer side of the grid
                step = torch.where(high > -low, -high, -low) * factor / -self.lowest
                zero = torch.zeros_like(low)
            else:
                step = (high - low) * factor / (self.highest - self.lowest)
                zero = (self.lowest - low * factor * _inverse(step)).round().clamp(self.lowest, self.highest)
            codes = self._nearest(groups, step, zero) - zero[..., None]
            # The least-squares scale of these codes, and what its stored type makes of it.
            fitted = (shares * codes * groups).sum(-1) / (shares * codes * codes).sum(-1).clamp_min(1e-30)
            fitted = fitted.to(self.dtype).float()
            codes = self._nearest(groups, fitted, zero) - zero[..., None]
            error = (shares * (codes * fitted[..., None] - groups).square()).sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            scales, zeros = torch.where(better, fitted, scales), torch.where(better, zero, zeros)
        return scales, zeros

    def _nearest(self, groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return (groups * _inverse(scales)[..., None] + zeros[..., None]).round().clamp(self.lowest, self.highest)

    def steps(self, weight: Tensor) -> Tensor:
        """Return the steps of grids that just reach the extremes of each group. (N, K) → (N, G)."""
        groups = weight.reshape(len(weight), -1, self.group_size)
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        if self.symmetric:
            return torch.maximum(-low, high) / -self.lowest
        return (high - low) / (self.highest - self.lowest)

    def places(self, weight: Tensor, fitted: Fitted) -> Tensor:
        """Return where weights lie on the grid, in codes and not rounded. (N, K)."""
        places = weight * self.spread(_inverse(fitted.scales))
        return places if fitted.zeros is None else places + self.spread(fitted.zeros)

    def nearest(self, places: Tensor) -> Tensor:
        """Round places to codes, as float32."""
        return places.round().clamp(self.lowest, self.highest)

    def values(self, codes: Tensor, fitted: Fitted) -> Tensor:
        """Return the weights that codes stand for, float32. (N, K)."""
        codes = codes.float()
        if fitted.zeros is not None:
            codes = codes - self.spread(fitted.zeros)
        return codes * self.spread(fitted.scales)

    def spread(self, groups: Tensor) -> Tensor:
        """Repeat values of groups for each of their weights. (N, G) → (N, K)."""
        return groups.repeat_interleave(self.group_size, dim=1)


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale; 0 where the scale is too small to invert."""
    usable = scales.abs() >= _SMALLEST_SCALE
    return torch.where(usable, 1 / torch.where(usable, scales, 1.0), 0.0)


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
