"""The calibrate stage: codes and scales for the weights of a model, chosen by what they do to its results on text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.estimates import ModelSize
from slipway.stage import Context, Effort, Role, Stage
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.levels import why_not_calibrated

_TUNING_BYTES = 41
"""Bytes a weight of what the tuning keeps in mapped files (``docs/adr/0026-calibration-of-our-own.md``)."""
_TUNED_WEIGHTS = 250_000
"""Weights of the largest model that ``auto`` tunes, by second of the budget: 150 million by default."""


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


def output_bytes(params: Mapping[str, Any], size: ModelSize) -> int:
    """Estimate the disk that a calibration takes: its result, and the mapped files of the tuning if it is affordable."""
    wanted = CalibrateParams.model_validate(dict(params))
    tuned = wanted.method == "autoround" or (
        wanted.method == "auto" and size.weights <= _TUNED_WEIGHTS * wanted.time_budget_seconds
    )
    return size.at_level("int8") + (_TUNING_BYTES * size.weights if tuned else 0)


STAGE = Stage(
    name="calibrate",
    version=3,
    inputs=("model", "data"),
    outputs=("calibration",),
    params=CalibrateParams,
    run=run,
    libraries=("numpy", "safetensors", "torch", "transformers"),
    resumable=True,
    role=Role.CALIBRATION,
    effort=Effort(seconds=60.0, seconds_per_gb=120.0, phases={"blocks": (0.0, 0.35), "tune": (0.35, 0.95)}),
    output_bytes=output_bytes,
    refuses=why_not_calibrated,
)
