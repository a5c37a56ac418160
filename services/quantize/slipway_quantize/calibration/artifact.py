"""Write the calibrated codes, and the description of how they were found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from slipway.distribution.installed import installed_version
from slipway_quantize.calibrated import DESCRIPTION, SCHEMA, WEIGHTS
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.calibration.rounding.roundings import Fixed
from slipway_quantize.calibration.streaming.model import StreamedModel

_LIBRARIES = ("numpy", "safetensors", "torch", "transformers")


class CalibrationResult(Protocol):
    """The result of a calibration, as :class:`slipway_quantize.calibration.calibrate.Result` has it."""

    weights: dict[str, Fixed]
    methods: dict[str, str]
    errors: dict[str, dict[str, float]]
    alone: dict[str, float]


def write_calibration(
    target: Path, model: StreamedModel, found: CalibrationResult, *, params: CalibrateParams, facts: dict[str, Any]
) -> None:
    """Write ``weights.safetensors`` and ``calibration.json`` into ``target``: the same bytes in every run.

    Args:
        target: An empty folder.
        model: The model.
        found: The result of the calibration.
        params: Parameters.
        facts: More to describe; nothing that differs from run to run, such as times.
    """
    tensors = {}
    for name, weight in found.weights.items():
        tensors[f"{name}.codes"] = weight.codes.contiguous()
        tensors[f"{name}.scales"] = weight.fitted.scales.float().contiguous()
        if weight.fitted.zeros is not None:
            tensors[f"{name}.zero_points"] = weight.fitted.zeros.to(torch.int8).contiguous()
    save_file(tensors, target / WEIGHTS)
    (target / WEIGHTS).chmod(0o644)
    description = {
        "schema_version": SCHEMA,
        "bits": params.bits,
        "group_size": params.group_size,
        "symmetric": params.symmetric,
        "seed": params.seed,
        "scale_dtype": str(model.dtype).removeprefix("torch."),
        "tied_embedding": model.tied,
        **facts,
        "weights": {
            name: {
                "method": method,
                "bits": found.weights[name].grid.bits,
                "held_out_error_before": found.errors[name]["rtn"],
                "held_out_error": found.errors[name].get(method),
                **({"divergence": max(0.0, found.alone[name])} if name in found.alone else {}),
            }
            for name, method in found.methods.items()
        },
        "libraries": {name: installed_version(name) for name in _LIBRARIES},
    }
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    (target / DESCRIPTION).write_text(text, encoding="utf-8")
