"""Grids of small integers: fit scales and zero points to weights, and round to them.

Axes: N output features, K input features, G groups of one row (K = G · group size). A value is (code - zero point) · scale; codes and
zero points are signed integers of the grid's bits. A symmetric grid has no zero points, and scales of either sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST_SCALE = 1e-37
"""Its inverse is still a float32."""
_WIDEST, _NARROWEST, _TRIED = 1.15, 0.7, 19
"""Tried ranges, relative to the one that just reaches a group's extremes: a narrower one clips these and may fit all others better."""
_BLOCK_WEIGHTS = 1 << 17
"""Weights that are fitted at once: their intermediate values stay in the processor's cache."""


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
