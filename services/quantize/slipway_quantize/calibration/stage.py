"""The calibrate stage: codes and scales for the weights of a model, chosen by what they do to its results on text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Role, Stage
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.levels import why_not_calibrated


def run(inputs: Mapping[str, Path], params: CalibrateParams, ctx: Context) -> dict[str, Path]:
    """Calibrate ``inputs["model"]`` with the text in ``inputs["data"]``.

    Raises:
        slipway.errors.QuantizationError: With the reasons listed in the package's README.
    """
    from slipway_quantize.calibration.calibrate import calibrate

    target = ctx.workdir / "calibration"
    target.mkdir()
    calibrate(inputs["model"], inputs["data"], target, params=params, ctx=ctx)
    return {"calibration": target}


STAGE = Stage(
    name="calibrate",
    version=1,
    inputs=("model", "data"),
    outputs=("calibration",),
    params=CalibrateParams,
    run=run,
    libraries=("numpy", "safetensors", "torch", "transformers"),
    resumable=True,
    role=Role.CALIBRATION,
    effort=Effort(seconds=60.0, seconds_per_gb=120.0, phases={"blocks": (0.0, 0.35), "tune": (0.35, 0.95)}),
    output_bytes=lambda _, size: size.at_level("int8"),
    refuses=why_not_calibrated,
)
