"""The onnx_export stage: export a merged PyTorch folder to ONNX graphs, with a KV cache if the model generates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.machine.onnx_runtime import runtime_provider
from slipway.sizes import GRAPH_BYTES
from slipway.stage import Context, Deferral, Effort, Forecast, Installation, Provider, Stage, library_provider
from slipway_onnx_export.params import LIBRARIES, OnnxExportParams, can_leave_out, opset_advice, refusal_reason
from slipway_onnx_export.settings import describe_activations


def run(inputs: Mapping[str, Path], params: OnnxExportParams, ctx: Context) -> dict[str, Path]:
    """Export ``inputs["pytorch"]``; the README describes the output folder.

    Raises:
        ONNXExportError: With the reasons listed in the README.
    """
    from slipway_onnx_export.export import export_model

    return {"onnx": export_model(inputs, params, ctx)}


def probe() -> tuple[Provider, ...]:
    """Return the libraries, and what ONNX Runtime computes on."""
    return tuple(runtime_provider() if name == "onnxruntime" else library_provider(name) for name in LIBRARIES)


STAGE = Stage(
    name="onnx_export",
    version=4,
    inputs=("pytorch",),
    outputs=("onnx",),
    params=OnnxExportParams,
    run=run,
    libraries=LIBRARIES,
    forecast=Forecast(
        output_bytes=lambda params, size: GRAPH_BYTES if params.weights == "deferred" else size.graph_bytes,
        advice=opset_advice,
        describes=describe_activations,
        refuses=lambda params, config: refusal_reason(config, parts=params.parts),
    ),
    deferral=Deferral(
        leaves_out=can_leave_out,
        reads=lambda params: ("pytorch",) if params.weights == "deferred" else (),
    ),
    installation=Installation(probe=probe),
    effort=Effort(
        seconds=8.0,
        seconds_per_gb=15.0,
        phases={"graph": (0.1, 0.3), "weights": (0.3, 0.7), "parity": (0.7, 0.95)},
    ),
    optional_inputs=("base", "adapter"),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
