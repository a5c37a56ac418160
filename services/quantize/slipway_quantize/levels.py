"""The integer levels of weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

CASTS = ("fp16", "bf16")
"""Levels at which every tensor of any model is cast."""
WIDE = 8
"""Bits of weights that matter too much for fewer."""


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is not a power of two; use 16, 32, 64, 128 or 256")
    return value


GroupSize = Annotated[int, Field(ge=16, le=256), AfterValidator(_power_of_two)]
"""Weights that share a scale, as a parameter of a stage."""


@dataclass(frozen=True, slots=True)
class IntLevel:
    """An integer level of the weights.

    Attributes:
        bits: 3, 4 or 8.
        group_size: Weights per scale.
        packed: Whether integers and scales are stored; if not, the same values as dense weights of the original type.
        keep: Names of linear layers that keep their type.
    """

    bits: int
    group_size: int
    packed: bool
    keep: frozenset[str] = frozenset()


def is_named(module: str, names: Collection[str]) -> bool:
    """Return whether a linear layer is among ``names``. One of two names may lack the prefix of the model's class."""
    return any(f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}") for name in names)
