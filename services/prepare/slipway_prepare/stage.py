"""Prepare stage: it turns a base model stored as pickle, in 8-bit floats or quantized into plain 16- or 32-bit safetensors with a usual tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Role, Stage
from slipway_prepare.params import PrepareParams


def run(inputs: Mapping[str, Path], params: PrepareParams, ctx: Context) -> dict[str, Path]:
    """Prepare ``base`` and return the transformers folder ``base``.

    Raises:
        CheckpointValidationError: the base cannot be prepared; see this service's README for the reasons.
    """
    from slipway_prepare.prepare import prepare

    output = ctx.workdir / "base"
    prepare(inputs["base"], output, params=params, ctx=ctx)
    return {"base": output}


STAGE = Stage(
    name="prepare",
    version=4,
    inputs=("base",),
    outputs=("base",),
    params=PrepareParams,
    run=run,
    libraries=("compressed-tensors", "torch", "transformers"),
    role=Role.PREPARATION,
    effort=Effort(seconds_per_gb=10.0),
    forecast=Forecast(output_bytes=lambda _, size: size.stored_bytes),
)
