"""What is known of the inputs of products: their ranges on text, and how features share their outliers with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Range:
    """The range of one value.

    Attributes:
        largest: Magnitude that the largest code stands for, after the division by ``factors``.
        factors: Divisor of each feature, by which the weights are multiplied; None: 1. float32 (K,)
    """

    largest: float
    factors: Array | None = None


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of a graph.

    Attributes:
        of: Range by the name of the value that products read.
        kept: Values whose products stay as they are, with the reason.
        facts: What was measured, for ``quantization.json``.
    """

    of: Mapping[str, Range]
    kept: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
