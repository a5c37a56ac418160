"""The coreml stage: convert a merged PyTorch model to a package for Core ML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Hardware, Stage
from slipway_coreml.params import PRODUCT, CoremlParams


def run(inputs: Mapping[str, Path], params: CoremlParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.mlpackage``; the README describes the output folder.

    Raises:
        slipway.errors.CoreMLExportError: With the reasons that the README lists.
    """
    from slipway_coreml.export import export_model

    target = ctx.workdir / "coreml"
    target.mkdir()
    export_model(inputs["pytorch"], target, params, ctx)
    return {"coreml": target}


STAGE = Stage(
    name="coreml",
    version=1,
    inputs=("pytorch",),
    outputs=("coreml",),
    params=CoremlParams,
    run=run,
    libraries=("coremltools", "torch", "transformers"),
    effort=Effort(seconds=15.0, seconds_per_gb=40.0),
    forecast=Forecast(
        output_bytes=lambda params, size: size.at_level(params.level) + 4 * size.largest,
        refuses=lambda _, config: config.why_no_text_graph(PRODUCT),
    ),
    hardware=Hardware(memory=8.0),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
