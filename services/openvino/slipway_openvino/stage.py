"""The openvino stage: turn an ONNX graph into an IR that OpenVINO's runtimes take as it lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Stage
from slipway_openvino.params import OpenVinoParams, refusal_reason


def run(inputs: Mapping[str, Path], params: OpenVinoParams, ctx: Context) -> dict[str, Path]:
    """Convert ``inputs["onnx"]``.

    Raises:
        slipway.errors.OpenVinoExportError: With the reasons the package's README lists.
    """
    from slipway_openvino.convert import convert_folder

    target = ctx.workdir / "openvino"
    target.mkdir()
    convert_folder(inputs["onnx"], target, params, ctx)
    return {"openvino": target}


STAGE = Stage(
    name="openvino",
    version=6,
    inputs=("onnx",),
    outputs=("openvino",),
    params=OpenVinoParams,
    run=run,
    libraries=("onnx-ir", "openvino", "openvino-tokenizers", "transformers"),
    effort=Effort(
        seconds=4.0,
        seconds_per_gb=2.0,
        phases={"read": (0.0, 0.2), "write": (0.2, 0.6), "tokenizer": (0.6, 1.0)},
    ),
    forecast=Forecast(
        output_bytes=lambda params, size: size.at_level(params.level) if params.level else size.graph_bytes,
        refuses=lambda _, config: refusal_reason(config),
    ),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
