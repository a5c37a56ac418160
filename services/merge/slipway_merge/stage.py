"""Merge stage: a LoRA adapter into its base model, tensor by tensor, exactly, in the memory of one block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.machine.processes import set_variable
from slipway.stage import Context, Deferral, Effort, Forecast, Keeps, Role, Stage
from slipway_merge.params import MergeParams


def run(inputs: Mapping[str, Path], params: MergeParams, ctx: Context) -> dict[str, Path]:
    """Merge ``adapter`` into ``base``; return the transformers folder ``pytorch``.

    Raises:
        ModelMergeError: the adapter cannot be merged exactly; see this service's README for the reasons.
        CheckpointValidationError: an input is missing, incomplete, corrupt or unsafe.
    """
    # The first to import numpy limits it to one thread, because the merge has its own threads.
    with set_variable("OPENBLAS_NUM_THREADS", "1"):
        from slipway_merge.merge import merge

    output = ctx.workdir / "pytorch"
    merge(inputs["base"], inputs["adapter"], output, params=params, ctx=ctx)
    return {"pytorch": output}


STAGE = Stage(
    name="merge",
    version=5,
    inputs=("base", "adapter"),
    outputs=("pytorch",),
    params=MergeParams,
    run=run,
    libraries=("numpy", "ml_dtypes", "peft", "torch", "transformers"),
    keeps=Keeps.PIECES,
    forecast=Forecast(
        output_bytes=lambda params, size: (
            size.companion_bytes + (0 if params.weights == "deferred" else size.weight_bytes)
        )
    ),
    deferral=Deferral(
        leaves_out=lambda params: params.verify != "full",
        compares=False,  # `verify: spot` compares samples of every changed tensor in either case
        reader="slipway_merge.deferred:MergedWeights",
    ),
    role=Role.MERGE,
    effort=Effort(seconds_per_gb=5.0, phases={"check": (0.0, 0.05), "merge": (0.05, 0.7), "verify": (0.7, 0.95)}),
)
