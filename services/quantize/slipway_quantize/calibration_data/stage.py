"""The stage ``calibration_data``: choose the text for calibration, in the form in which the model reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Role, Stage
from slipway_quantize.calibration_data.params import CalibrationDataParams


def run(inputs: Mapping[str, Path], params: CalibrationDataParams, ctx: Context) -> dict[str, Path]:
    """Choose text from ``inputs["calibration"]``, or from the built-in text, for the model in ``inputs["model"]``.

    Raises:
        slipway.errors.QuantizationError: ``CALIBRATION_DATA_INVALID`` or ``CALIBRATION_OVERLAP``.
        slipway.errors.ValidationError: ``VALIDATION_IMPOSSIBLE``: the held-out text cannot be read.
    """
    from slipway_quantize.calibration_data.choice import choose_text

    target = ctx.workdir / "data"
    target.mkdir()
    choose_text(inputs, target, params, ctx)
    return {"data": target}


STAGE = Stage(
    name="calibration_data",
    version=2,
    inputs=("model",),
    optional_inputs=("calibration", "heldout"),
    outputs=("data",),
    params=CalibrationDataParams,
    run=run,
    libraries=("transformers",),
    role=Role.CALIBRATION_DATA,
    effort=Effort(seconds=5.0),
    forecast=Forecast(output_bytes=lambda params, _: 8 * params.tokens),
)
