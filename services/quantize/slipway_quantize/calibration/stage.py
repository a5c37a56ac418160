"""The calibrate stage: codes and scales for the weights of a model, chosen by what they do to its results on text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.sizes import ModelSize
from slipway.stage import Context, Effort, Forecast, Keeps, Role, Stage
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.params import calibration_refusal_reason

_TUNING_BYTES = 41
"""Bytes a weight of what the tuning keeps in mapped files (``docs/adr/0026-calibration-of-our-own.md``)."""
_SECONDS_PER_GB = 900.0
"""Of the weights of a small model in 16 bits."""


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


def output_bytes(params: CalibrateParams, size: ModelSize) -> int:
    """Estimate the disk that a calibration takes: its result, and the mapped files of the tuning if it is affordable."""
    return size.at_level("int8") + (_TUNING_BYTES * size.weights if params.method == "autoround" else 0)


def work_bytes(params: CalibrateParams, _: int, size: ModelSize) -> float:
    """Count the model's weights; where their time would exceed the budget, a thirtieth of them, which are read whatever is chosen."""
    within = params.time_budget_seconds / _SECONDS_PER_GB * 1e9
    return min(size.weight_bytes, within + size.weight_bytes / 30)


STAGE = Stage(
    name="calibrate",
    version=6,
    inputs=("model", "data"),
    outputs=("calibration",),
    params=CalibrateParams,
    run=run,
    libraries=("numpy", "safetensors", "torch", "transformers"),
    keeps=Keeps.PIECES,
    forecast=Forecast(
        output_bytes=output_bytes,
        refuses=lambda _, config: calibration_refusal_reason(config),
        work_bytes=work_bytes,
    ),
    role=Role.CALIBRATION,
    effort=Effort(
        seconds=60.0,
        seconds_per_gb=_SECONDS_PER_GB,
        phases={"costs": (0.0, 0.15), "blocks": (0.15, 0.9), "judge": (0.9, 1.0)},
    ),
)
