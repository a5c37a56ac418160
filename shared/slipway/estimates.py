"""How large a model is, and what is made of it: what stages and formats estimate with before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BYTES_PER_WEIGHT: Mapping[str, float] = {"fp16": 2.0, "bf16": 2.0, "int8": 1.25, "int4": 0.75}
"""Of a quantized model. Above 1 and 0.5: scales, and tensors that stay in 16 or 32 bit."""

FLOAT32_BYTES = 4
GRAPH_BYTES = 2 << 20
"""Of a graph's nodes, without weights."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large a model is.

    Attributes:
        weights: Number of its weights.
        weight_bytes: What they take on disk.
        largest: Number of the largest tensor's weights.
        largest_bytes: What that takes on disk.
        companion_bytes: Configuration, tokenizer and the like.
    """

    weights: int
    weight_bytes: int
    largest: int
    largest_bytes: int
    companion_bytes: int

    @property
    def stored_bytes(self) -> int:
        """The model as it is."""
        return self.weight_bytes + self.companion_bytes

    @property
    def graph_bytes(self) -> int:
        """The model as a graph in float32."""
        return self.weights * FLOAT32_BYTES + self.companion_bytes + GRAPH_BYTES

    def at_level(self, level: str) -> int:
        """Weights of a level, and what lies beside them; of a level that is not known, as in float32."""
        return int(self.weights * BYTES_PER_WEIGHT.get(level, FLOAT32_BYTES)) + self.companion_bytes
