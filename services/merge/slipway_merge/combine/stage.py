"""Combine stage: make one LoRA adapter from several, so that later stages merge one adapter and compare with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Role, Stage
from slipway_merge.params import CombineParams


def run(inputs: Mapping[str, Path], params: CombineParams, ctx: Context) -> dict[str, Path]:
    """Combine ``adapter`` and every further input into one adapter; return the folder ``adapter``.

    Raises:
        ModelMergeError: the adapters cannot be combined; see this service's README for the reasons.
        CheckpointValidationError: an input is missing, incomplete, corrupt or unsafe.
    """
    from slipway_merge.combine.combine import combine

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
    role=Role.COMBINATION,
    effort=Effort(seconds=3.0),
)
