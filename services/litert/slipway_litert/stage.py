"""The litert stage: convert a merged PyTorch model to a program for LiteRT, the runtime that was TensorFlow Lite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Hardware, Installation, Stage
from slipway_litert.params import PRODUCT, LitertParams


def run(inputs: Mapping[str, Path], params: LitertParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.tflite``; the README describes the output folder.

    Raises:
        slipway.errors.LiteRtExportError: With the reasons that the README lists.
    """
    from slipway_litert.export import export_model

    target = ctx.workdir / "litert"
    target.mkdir()
    export_model(inputs["pytorch"], target, params, ctx)
    return {"litert": target}


STAGE = Stage(
    name="litert",
    version=1,
    inputs=("pytorch",),
    outputs=("litert",),
    params=LitertParams,
    run=run,
    libraries=("ai-edge-litert", "ai-edge-quantizer", "litert-converter", "litert-torch", "torch", "transformers"),
    forecast=Forecast(
        output_bytes=lambda params, size: size.at_level(params.level) + 4 * size.largest,
        refuses=lambda _, config: config.why_no_text_graph(PRODUCT),
    ),
    hardware=Hardware(memory=8.0),
    installation=Installation(own_environment="its converter takes an older typing-extensions"),
    effort=Effort(seconds=20.0, seconds_per_gb=60.0),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
