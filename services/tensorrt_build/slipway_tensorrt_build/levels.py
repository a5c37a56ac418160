"""The levels of engines, and the GPU architectures that compute in their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LEVELS = ("fp16", "bf16", "int8_static", "fp8_static")
"""TensorRT takes all types from the graph, which the quantize stage writes at these levels."""

LEAST_ARCHITECTURES: Mapping[str, int] = {"bf16": 80, "fp8_static": 89}
"""The first compute capability, without the dot, whose GPUs have the type of a level."""


FITTED_TO_TEXT = ("int8_static", "fp8_static")
"""Levels whose graphs hold ranges of activations, which belong to one merge."""


def lacking(level: str, targets: Iterable[str]) -> list[str]:
    """Return the targets (``sm75``) whose GPUs do not have the type of a level."""
    least = LEAST_ARCHITECTURES.get(level, 0)
    return [target for target in targets if int(target.removeprefix("sm")) < least]
