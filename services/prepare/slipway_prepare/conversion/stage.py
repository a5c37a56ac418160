"""The stage behind ``slipway convert``. No export plans it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Role, Stage
from slipway_prepare.params import ConvertParams


def run(inputs: Mapping[str, Path], params: ConvertParams, ctx: Context) -> dict[str, Path]:
    """Write what ``source`` holds as pickles into the folder ``converted``, as safetensors, with ``conversion.json`` about it.

    Raises:
        CheckpointValidationError: Nothing below the source could be converted; the reason is that of its first file.
    """
    from slipway_prepare.conversion.convert import convert

    output = ctx.workdir / "converted"
    convert(inputs["source"], output, params=params, ctx=ctx)
    return {"converted": output}


CONVERSION = Stage(
    name="convert",
    version=1,
    inputs=("source",),
    outputs=("converted",),
    params=ConvertParams,
    run=run,
    libraries=("torch", "transformers"),
    role=Role.CONVERSION,
)
