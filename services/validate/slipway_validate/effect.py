"""How much of the adapter's effect an output has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slipway_validate.numerics import Floats, Logits, blocks, finite


@dataclass(frozen=True, slots=True)
class AdapterEffect:
    """The adapter's effect, reference - base, and what of it is in an output, own - base, as sums over all values.

    Attributes:
        along: Their inner product.
        square: Square of the effect.
        own_square: Square of what is in the output.
        values: How many values there are.
    """

    along: float
    square: float
    own_square: float
    values: int

    @property
    def strength(self) -> float | None:
        """1: all of the effect, 0: none, above 1: too much. None when the adapter has no effect, or a value is not finite.

        The least-squares c in own - base ≈ c (reference - base). Rounding noise is nearly orthogonal to the adapter's effect, so c
        sees a wrong scale that KL at 4 bits hides. Networks are not linear: a scale wrong by a tenth moves c by about half of that.
        """
        return finite(self.along / self.square) if math.isfinite(self.square) and self.square > 0 else None

    @property
    def scatter(self) -> float | None:
        """How far rounding noise may move the strength: its standard error, if noise is equal in all directions.

        Of next tokens, whose values are many, it is next to nothing; a classifier gives a few values per text.
        """
        strength = self.strength
        if strength is None or self.values < 2:
            return None
        rest = max(0.0, self.own_square - strength * self.along)
        return finite(math.sqrt(rest / self.square / (self.values - 1)))


def effect_in(base: Logits, reference: Logits, own: Logits, *, centred: bool = True) -> AdapterEffect:
    """What of the adapter's effect is in an output. base, reference, own: (N, P, V).

    Logits are centred per position because softmax ignores a shift; values that are no logits are not.
    """
    along = square = own_square = 0.0
    for windows in zip(base, reference, own, strict=True):
        for rows in blocks(*windows[0].shape):
            start, end, found = (_wide(window[rows], centred=centred) for window in windows)
            effect, part = end - start, found - start
            along += float(np.vdot(part, effect))
            square += float(np.vdot(effect, effect))
            own_square += float(np.vdot(part, part))
    positions, width = base.shape[0] * base.shape[1], base.shape[2]
    return AdapterEffect(along, square, own_square, positions * (width - 1 if centred else width))


def _wide(values: Logits, *, centred: bool) -> Floats:
    wide = values.astype(np.float64)
    return wide - wide.mean(axis=-1, keepdims=True) if centred else wide
