"""Merge stage: a LoRA adapter into its base model, tensor by tensor, exactly, in the memory of one block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipway.stage import Context, Effort, Role, Stage
from slipway_merge.params import MergeParams


def run(inputs: Mapping[str, Path], params: MergeParams, ctx: Context) -> dict[str, Path]:
    """Merge ``adapter`` into ``base``; return the transformers folder ``pytorch``.

    Raises:
        ModelMergeError: the adapter cannot be merged exactly; see this service's README for the reasons.
        CheckpointValidationError: an input is missing, incomplete, corrupt or unsafe.
    """
    with _one_thread_for_blas():
        from slipway_merge.merge import merge

    output = ctx.workdir / "pytorch"
    merge(inputs["base"], inputs["adapter"], output, params=params, ctx=ctx)
    return {"pytorch": output}


@contextmanager
def _one_thread_for_blas() -> Iterator[None]:
    """Limit numpy to one thread if the block is the first to import it, because the merge has its own threads."""
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = before


STAGE = Stage(
    name="merge",
    version=4,
    inputs=("base", "adapter"),
    outputs=("pytorch",),
    params=MergeParams,
    run=run,
    libraries=("numpy", "ml_dtypes", "peft", "torch", "transformers"),
    resumable=True,
    role=Role.MERGE,
    effort=Effort(seconds_per_gb=5.0, phases={"check": (0.0, 0.05), "merge": (0.05, 0.7), "verify": (0.7, 0.95)}),
    output_bytes=lambda params, size: (
        size.companion_bytes + (0 if params.get("weights") == "deferred" else size.weight_bytes)
    ),
    defers=lambda params: params.get("verify") != "full",
    reader="slipway_merge.deferred:MergedWeights",
)
