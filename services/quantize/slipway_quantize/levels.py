"""The integer levels of weights, and the size within which some weights get more bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from slipway.errors import QuantizationError
from slipway.levels import WIDTHS
from slipway.sizes import format_size

CASTS = ("fp16", "bf16")
"""Levels at which every tensor of any model is cast."""
WIDE = 8
"""Bits of weights that matter too much for fewer."""

BYTES_PER_WEIGHT = 2
"""Bytes of a weight in 16 bits. Shares refer to that size, whatever type the input has, so that they mean the same for every format."""


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is not a power of two; use 16, 32, 64, 128 or 256")
    return value


GroupSize = Annotated[int, Field(ge=16, le=256), AfterValidator(_power_of_two)]
"""Weights that share a scale, as a parameter of a stage."""


def _width(value: int) -> int:
    if value not in WIDTHS:
        raise ValueError(f"{value} is no width of integers; use {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}")
    return value


Bits = Annotated[int, AfterValidator(_width)]
"""Bits of a weight, as a parameter of a stage."""


@dataclass(frozen=True, slots=True)
class IntLevel:
    """An integer level of the weights.

    Attributes:
        bits: One of ``slipway.levels.WIDTHS``.
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


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """The largest size of an output's weight files.

    Attributes:
        size: In bytes; 0 if it is a share.
        share: Share of the size that all weights have in 16 bits; 0 if it is a size.
        wide: Share of the way from the smallest to the largest possible size; used if the others are 0.
    """

    size: int = 0
    share: float = 0.0
    wide: float = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether a size is asked for, and not only a share of wide weights."""
        return bool(self.size or self.share)

    def of(self, weights: int, *, least: int, most: int) -> int:
        """Return the largest size in bytes for a model of this many weights, of sizes from ``least`` to ``most``."""
        if self.is_asked:
            return self.size or int(self.share * weights * BYTES_PER_WEIGHT)
        return least + int(self.wide * (most - least))


def size_budget_error(limit: int, least: int) -> QuantizationError:
    """Return the error of a size that is too small.

    Args:
        limit: The size in bytes.
        least: The smallest possible size.
    """
    return QuantizationError(
        f"the weights have at least {least} bytes ({format_size(least)}) at this level, and the size budget is {limit} bytes "
        f"({format_size(limit)})",
        reason="SIZE_BUDGET_UNMET",
        remedy=f"allow {least} bytes or more, or choose larger groups",
        about={"size_budget_bytes": limit, "smallest_bytes": least},
    )
