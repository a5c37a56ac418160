"""The executorch stage: lower a merged PyTorch model to a program for ExecuTorch's runtime with XNNPACK."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Hardware, Installation, Stage
from slipway_executorch.params import PRODUCT, ExecutorchParams


def run(inputs: Mapping[str, Path], params: ExecutorchParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.pte``; the README describes the output folder.

    Raises:
        slipway.errors.ExecutorchExportError: With the reasons that the README lists.
    """
    from slipway_executorch.export import export_model

    target = ctx.workdir / "executorch"
    target.mkdir()
    export_model(inputs["pytorch"], target, params, ctx)
    return {"executorch": target}


STAGE = Stage(
    name="executorch",
    version=1,
    inputs=("pytorch",),
    outputs=("executorch",),
    params=ExecutorchParams,
    run=run,
    libraries=("executorch", "torch", "torchao", "transformers"),
    forecast=Forecast(
        output_bytes=lambda params, size: size.at_level(params.level) + 4 * size.largest,
        refuses=lambda _, config: config.why_no_text_graph(PRODUCT),
    ),
    hardware=Hardware(memory=8.0),
    installation=Installation(own_environment="it pins torchao and versions of what other tools need"),
    effort=Effort(seconds=20.0, seconds_per_gb=40.0),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
