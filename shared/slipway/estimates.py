"""Sizes of models and their outputs, with which stages and formats estimate before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from slipway.levels import LEVELS

FLOAT32_BYTES = 4
GRAPH_BYTES = 2 << 20
"""Size of a graph's nodes, without weights."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model.

    Attributes:
        weights: Number of weights.
        weight_bytes: Size of the weights on disk.
        largest: Number of weights in the largest tensor.
        largest_bytes: Size of that tensor on disk.
        companion_bytes: Size of the configuration, tokenizer and other files.
    """

    weights: int
    weight_bytes: int
    largest: int
    largest_bytes: int
    companion_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Return the size of the model as stored."""
        return self.weight_bytes + self.companion_bytes

    @property
    def graph_bytes(self) -> int:
        """Return the size of the model as a graph in float32."""
        return self.weights * FLOAT32_BYTES + self.companion_bytes + GRAPH_BYTES

    def at_level(self, level: str) -> int:
        """Return the size of the model at a level, with its other files; an unknown level counts as float32."""
        each = LEVELS[level].bytes_per_weight if level in LEVELS else FLOAT32_BYTES
        return int(self.weights * each) + self.companion_bytes
