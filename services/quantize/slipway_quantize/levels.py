"""The integer levels of weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IntLevel:
    """An integer level of the weights.

    Attributes:
        bits: 4 or 8.
        group_size: Weights per scale.
        packed: Whether integers and scales are stored; if not, the same values as dense weights of the original type.
    """

    bits: int
    group_size: int
    packed: bool
