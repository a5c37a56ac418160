"""Round the weights of a program to integers, by coremltools' own passes."""

from __future__ import annotations

from typing import Any

from coremltools.optimize import coreml as compression

from slipway_coreml.params import Level

MATRICES = ("linear", "matmul", "gather")
"""Operations whose constants are rounded: products and lookups of tokens."""
SMALLEST = 2048
"""Weights of fewer values stay as they are."""


def round_weights(model: Any, level: Level, group_size: int) -> Any:
    """Return a model whose matrices are integers: of 8 bits with a scale for each row, or of 4 bits with one for each group in a row."""
    rows = compression.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int8", granularity="per_channel", weight_threshold=SMALLEST
    )
    groups = compression.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=group_size, weight_threshold=SMALLEST
    )
    return compression.linear_quantize_weights(
        model,
        compression.OptimizationConfig(op_type_configs=dict.fromkeys(MATRICES, rows if level == "int8" else groups)),
    )
