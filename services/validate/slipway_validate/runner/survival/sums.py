"""Compare stored values with W and W + Δ by sums that are gathered piece by piece.

Axes: K input features, R some of the output features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Both:
    """Some rows of W and of W + Δ, and what comparing any stored weight with them needs.

    Attributes:
        before: W. float32 (R, K)
        after: W + Δ. float32 (R, K)
    """

    before: Tensor
    after: Tensor

    @cached_property
    def update(self) -> Tensor:
        """Return Δ, (R, K)."""
        return self.after - self.before

    @cached_property
    def update_square(self) -> float:
        """Return |Δ|²."""
        return _dot(self.update, self.update)

    @cached_property
    def after_square(self) -> float:
        """Return |W + Δ|²."""
        return _dot(self.after, self.after)

    def with_update_of(self, other: Both) -> Both:
        """Return the same rows of W with another module's Δ."""
        return Both(self.before, self.before + other.update)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a module, as in :class:`slipway.validation.survival.ModuleSurvival`."""

    strength: float | None = None
    noise: float | None = None
    cosine: float | None = None
    weight_error: float | None = None


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over stored values Q(W + Δ), from which the figures of a module follow.

    Attributes:
        size: |Δ|².
        whole: |W + Δ|².
        moved: |Q(W + Δ) - W|².
        common: Product of Q(W + Δ) - W and Δ.
        error: |Q(W + Δ) - W - Δ|².
        count: Number of values.
    """

    size: float = 0.0
    whole: float = 0.0
    moved: float = 0.0
    common: float = 0.0
    error: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, own: Both, stored: Tensor) -> Sums:
        """Return the sums over some rows, (R, K)."""
        change, distance = stored - own.before, stored - own.after
        return cls(
            own.update_square,
            own.after_square,
            _dot(change, change),
            _dot(change, own.update),
            _dot(distance, distance),
            change.numel(),
        )

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over both."""
        return Sums(
            self.size + other.size,
            self.whole + other.whole,
            self.moved + other.moved,
            self.common + other.common,
            self.error + other.error,
            self.count + other.count,
        )

    def figures(self) -> Figures:
        """Return the figures."""
        weight_error = math.sqrt(self.error / self.whole) if self.whole and math.isfinite(self.error) else None
        if not self.size or not math.isfinite(self.common) or not math.isfinite(self.size):
            return Figures(weight_error=weight_error)
        noise = max(self.moved - self.common * self.common / self.size, 0.0) / self.size / self.count
        return Figures(
            strength=self.common / self.size,
            noise=math.sqrt(noise),
            cosine=self.common / math.sqrt(self.size * self.moved) if self.moved else 0.0,
            weight_error=weight_error,
        )


def _dot(first: Tensor, second: Tensor) -> float:
    """Return the sum of products; each row in float32, the rows in float64."""
    return float(torch.linalg.vecdot(first, second).double().sum())
