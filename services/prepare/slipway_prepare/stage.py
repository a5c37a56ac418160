"""Prepare stage: a base model that is a pickle, in 8-bit floats or quantized becomes plain 16- or 32-bit safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from slipway.stage import Context, Stage, StageParams


class PrepareParams(StageParams):
    """Parameters of the preparation."""

    merge_onto: Literal["original", "nf4"] = Field(
        default="original",
        description="What the adapter is merged onto: the weights as they are, or what NF4 with double quantization leaves of them",
    )
    max_shard_bytes: int = Field(
        default=5_000_000_000,
        ge=1 << 10,
        description="Largest weights file in bytes; a larger tensor has one of its own",
    )


def run(inputs: Mapping[str, Path], params: PrepareParams, ctx: Context) -> dict[str, Path]:
    """Prepare ``base``; returns the transformers folder ``base``.

    Raises:
        CheckpointValidationError: the base cannot be prepared; see this service's README for the reasons.
    """
    from slipway_prepare.prepare import prepare

    output = ctx.workdir / "base"
    prepare(inputs["base"], output, params=params, ctx=ctx)
    return {"base": output}


STAGE = Stage(
    name="prepare",
    version=2,
    inputs=("base",),
    outputs=("base",),
    params=PrepareParams,
    run=run,
    libraries=("compressed-tensors", "torch", "transformers"),
)
