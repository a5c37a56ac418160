"""The importance stage: how much each input of each linear layer matters on text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Stage
from slipway_quantize.calibration.params import ImportanceParams
from slipway_quantize.params import calibration_refusal_reason

_OUTPUT_BYTES = 16 << 20


def run(inputs: Mapping[str, Path], params: ImportanceParams, ctx: Context) -> dict[str, Path]:
    """Measure ``inputs["model"]`` with the text in ``inputs["data"]``.

    Raises:
        slipway.errors.QuantizationError: With the reasons listed in the package's README.
    """
    from slipway_quantize.calibration.importance.measure import measure_importance

    target = ctx.workdir / "importance"
    target.mkdir()
    measure_importance(inputs["model"], inputs["data"], target, params=params, ctx=ctx)
    return {"importance": target}


STAGE = Stage(
    name="importance",
    version=2,
    inputs=("model", "data"),
    outputs=("importance",),
    params=ImportanceParams,
    run=run,
    libraries=("numpy", "safetensors", "torch", "transformers"),
    effort=Effort(seconds=10.0, seconds_per_gb=100.0, phases={"text": (0.1, 1.0)}),
    forecast=Forecast(
        output_bytes=lambda _, __: _OUTPUT_BYTES,
        refuses=lambda _, config: calibration_refusal_reason(config),
        work_bytes=lambda _params, _made, size: size.weight_bytes,
    ),
)
