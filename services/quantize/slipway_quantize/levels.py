"""The integer levels, apart from the formats that write them: ONNX needs none of what PyTorch's writer imports."""

from __future__ import annotations

from dataclasses import dataclass

BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class IntLevel:
    """How linear weights are written.

    Attributes:
        bits: 4 or 8.
        group_size: Weights per scale.
        packed: Integers and scales; otherwise the same values as dense weights of the original type.
    """

    bits: int
    group_size: int
    packed: bool
