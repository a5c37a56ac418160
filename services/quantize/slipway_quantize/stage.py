"""The quantize stage: a PyTorch or ONNX folder in fewer bits per weight, read and written a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.model.weights.divided_files import WEIGHTS
from slipway.parts import Part
from slipway.stage import Context, Deferral, Division, Effort, Forecast, Role, Stage
from slipway_quantize.params import QuantizeParams, most_parts, reads_deferred, refusal_reason


def run(inputs: Mapping[str, Path], params: QuantizeParams, ctx: Context) -> dict[str, Path]:
    """Quantize ``inputs["model"]``, with the integers in ``inputs["calibration"]`` if it is given.

    Raises:
        slipway.errors.QuantizationError: With the reasons listed in the package's README.
    """
    from slipway_quantize.quantize import quantize

    target = ctx.workdir / "model"
    target.mkdir()
    quantize(inputs, target, params, ctx)
    return {"model": target}


def _run_part(inputs: Mapping[str, Path], params: QuantizeParams, part: Part, ctx: Context) -> Path:
    from slipway_quantize.quantize import quantize_part

    return quantize_part(inputs, params, part, ctx)


def _join(parts: Mapping[str, Path], _params: QuantizeParams, ctx: Context) -> Path:
    from slipway_quantize.divided import join_parts

    return join_parts(parts, ctx)


STAGE = Stage(
    name="quantize",
    version=11,
    inputs=("model",),
    optional_inputs=("calibration", "data", "pytorch", "base", "adapter"),
    outputs=("model",),
    params=QuantizeParams,
    run=run,
    libraries=("compressed-tensors", "onnx-ir", "onnxruntime", "safetensors", "torch", "transformers"),
    forecast=Forecast(output_bytes=lambda params, size: size.at_level(params.level), refuses=refusal_reason),
    deferral=Deferral(reads=reads_deferred),
    division=Division(most=most_parts, run=_run_part, join=_join, adopts=WEIGHTS),
    role=Role.QUANTIZATION,
    effort=Effort(
        seconds_per_gb=6.0,
        phases={"quantize": (0.05, 0.8), "cast": (0.05, 0.8), "ranges": (0.05, 0.5), "check": (0.8, 0.95)},
    ),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
