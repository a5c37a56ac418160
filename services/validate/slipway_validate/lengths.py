"""Read how many tokens a model takes from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.families import Comparison, Family
from slipway_validate.cases import MIN_LENGTH

LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions")
"""Settings with the largest number of tokens that a model accepts."""


def longest_text(model: ModelConfig, family: Family) -> int:
    """Return the largest number of tokens that a model takes."""
    config = model.text
    longest = min((size for name in LENGTHS if (size := size_of(config, name))), default=1 << 30)
    counted_from = size_of(config, "pad_token_id") + 1  # RoBERTa and its kin count positions from there
    if family.comparison is not Comparison.NEXT_TOKEN and longest - counted_from >= MIN_LENGTH:
        longest -= counted_from
    return longest


def size_of(config: Mapping[str, Any], name: str) -> int:
    """Return a count in a configuration; 0 if it is not one."""
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0
