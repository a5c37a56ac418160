"""The onnx_export stage: a merged PyTorch folder to an ONNX decoder with KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from slipway.stage import Context, Stage, StageParams

EngineName = Literal["mobius", "dynamo", "legacy"]
Runtime = Literal["onnxruntime", "tensorrt"]
ParityMode = Literal["auto", "always", "never"]


class OnnxExportParams(StageParams):
    """Parameters of the onnx_export stage.

    Attributes:
        engine: Who makes the graph: ``mobius`` builds it, ``dynamo`` and ``legacy`` trace it with torch.
        opset: ONNX opset of the file; ``None`` takes the engine's best for the runtime.
        dynamic_axes: Whether the batch may vary. ``False`` fixes it to 1; sequence and past always vary, as a KV cache needs.
        optimize_graph: Whether ONNX Runtime's own fused operators may be used (``runtime`` onnxruntime only).
        runtime: Who will run the file. ``tensorrt`` means standard operators only, opset 20 at most.
        parity: Comparison with PyTorch: ``auto`` skips it, with a warning, for models whose fp32 weights exceed the
            attempt's memory.
        parity_tolerance: Largest allowed difference of logits, relative to the largest reference logit above 1.
    """

    engine: EngineName = "mobius"
    opset: int | None = Field(default=None, ge=7, le=30)
    dynamic_axes: bool = True
    optimize_graph: bool = True
    runtime: Runtime = "onnxruntime"
    parity: ParityMode = "auto"
    parity_tolerance: float = Field(default=1e-4, gt=0, le=0.1)


def run(inputs: Mapping[str, Path], params: OnnxExportParams, ctx: Context) -> dict[str, Path]:
    """Export ``inputs["pytorch"]``; see the README for what the output folder holds.

    Raises:
        ONNXExportError: with the reasons listed in the README.
    """
    from slipway_onnx_export.export import export_model

    return {"onnx": export_model(inputs["pytorch"], params, ctx)}


STAGE = Stage(
    name="onnx_export",
    version=2,
    inputs=("pytorch",),
    outputs=("onnx",),
    params=OnnxExportParams,
    run=run,
    libraries=("mobius-onnx", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers"),
)
