"""Combine stage: several LoRA adapters as one, so that everything after it has one adapter to merge and to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from slipway.stage import Context, Stage, StageParams


class CombineParams(StageParams):
    """Parameters of the combination; names and meanings are those of peft's ``add_weighted_adapter``."""

    weights: tuple[float, ...] = Field(
        default=(), description="One factor per adapter, in the order of the inputs; none given counts as 1 for each"
    )
    combination_type: Literal["cat", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"] = Field(
        default="cat", description="cat is the exact sum; the others mix the factors, at the rank they have"
    )
    density: float = Field(default=0.5, gt=0.0, le=1.0, description="Share of the values that pruning types keep")
    majority_sign_method: Literal["total", "frequency"] = Field(
        default="total", description="How the types with ties elect a sign"
    )
    seed: int = Field(default=0, ge=0, description="Seed of the types with dare, which prune at random")


def run(inputs: Mapping[str, Path], params: CombineParams, ctx: Context) -> dict[str, Path]:
    """Combine ``adapter`` and every further input into one adapter; returns the folder ``adapter``.

    Raises:
        ModelMergeError: the adapters cannot be combined; see this service's README for the reasons.
        CheckpointValidationError: an input is missing, incomplete, corrupt or unsafe.
    """
    from slipway_merge.combine import combine

    output = ctx.workdir / "adapter"
    ordered = sorted(inputs.items(), key=lambda item: (item[0] != "adapter", item[0]))
    combine(ordered, output, params=params, ctx=ctx)
    return {"adapter": output}


STAGE = Stage(
    name="combine",
    version=1,
    inputs=("adapter",),
    outputs=("adapter",),
    params=CombineParams,
    run=run,
    libraries=("torch", "peft"),
    more_inputs=True,
)
