"""Merge stage: a LoRA adapter into its base model, tensor by tensor, exactly, in the memory of one block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from slipway.machine.processes import set_variable
from slipway.model.weights.divided_files import WEIGHTS
from slipway.parts import Part
from slipway.stage import Context, Deferral, Division, Effort, Forecast, Keeps, Role, Stage
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


def _run_part(inputs: Mapping[str, Path], params: MergeParams, part: Part, ctx: Context) -> Path:
    with set_variable("OPENBLAS_NUM_THREADS", "1"):
        from slipway_merge.parts import merge_part

    return merge_part(inputs, params, part, ctx)


def _join(parts: Mapping[str, Path], params: MergeParams, ctx: Context) -> Path:
    from slipway_merge.parts import join_parts

    return join_parts(parts, params, ctx)


def _most_parts(params: MergeParams, _inputs: Collection[str], weight_bytes: int) -> int:
    """Return the expected number of files; a check that loads the whole model is not divided."""
    return -(-weight_bytes // params.max_shard_bytes) if params.verify == "spot" else 1


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
    division=Division(most=_most_parts, run=_run_part, join=_join, adopts=WEIGHTS),
    role=Role.MERGE,
    effort=Effort(seconds_per_gb=5.0, phases={"check": (0.0, 0.05), "merge": (0.05, 0.7), "verify": (0.7, 0.95)}),
)
