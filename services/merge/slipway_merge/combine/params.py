"""Parameters of the combine stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams


class CombineParams(StageParams):
    """Parameters of the combination; names and meanings are those of peft's ``add_weighted_adapter``."""

    weights: tuple[float, ...] = Field(
        default=(), description="One factor per adapter, in the order of the inputs; by default 1 for each"
    )
    combination_type: Literal["cat", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"] = Field(
        default="cat", description="cat is the exact sum; the others mix the factors and keep their rank"
    )
    density: float = Field(default=0.5, gt=0.0, le=1.0, description="Share of the values that pruning types keep")
    majority_sign_method: Literal["total", "frequency"] = Field(
        default="total", description="How the types with ties elect a sign"
    )
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Seed for the types with dare, which prune at random")
