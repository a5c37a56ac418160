"""Calibrations of small models, as the stage ``calibrate`` writes them, with codes that plain rounding gives."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Arrays = dict[str, np.ndarray]


def write_calibration(
    model: Path,
    target: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    leave_out: Collection[str] = (),
    wide: Collection[str] = (),
    head: bool = True,
    method: str = "gptq",
) -> Path:
    """Write the calibration of a Hugging Face folder's linear weights: other codes than the quantize stage finds by itself."""
    target.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor for path in sorted(model.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    linear = {name: tensor for name, tensor in weights.items() if tensor.dim() == 2 and name.endswith("proj.weight")}
    if head:
        tied = next((tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight")), None)
        found = weights.get("lm_head.weight", tied)
        if found is not None:
            linear["lm_head.weight"] = found
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(linear.items()):
        if name not in leave_out and weight.shape[1] % group_size == 0:
            own = {"bits": 8, "symmetric": True} if name in wide else {"bits": bits, "symmetric": symmetric}
            for part, values in plainly_rounded(weight, group_size=group_size, **own).items():
                tensors[f"{name}.{part}"] = torch.from_numpy(values)
    save_file(tensors, target / "weights.safetensors")
    described: dict[str, Any] = {
        "schema_version": 1,
        "bits": bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "seed": 0,
        "weights": {
            name: {"method": method, "bits": 8 if name in wide else bits}
            for name in (each.removesuffix(".codes") for each in tensors if each.endswith(".codes"))
        },
    }
    (target / "calibration.json").write_text(json.dumps(described))
    return target


def plainly_rounded(weight: torch.Tensor, *, bits: int, group_size: int, symmetric: bool) -> Arrays:
    """Round a weight (N, K) with the largest value of each group, or its range, as the scale."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // group_size, group_size)
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if symmetric:
        scales = _stored(groups.abs().amax(-1) / highest, weight.dtype)
        zeros = torch.zeros_like(scales)
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = _stored((most - least) / (highest - lowest), weight.dtype)
        zeros = (lowest - least / scales).round().clamp(lowest, highest)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(lowest, highest)
    found = {"codes": codes.reshape(rows, columns).to(torch.int8).numpy(), "scales": scales.numpy()}
    return found if symmetric else {**found, "zero_points": zeros.to(torch.int8).numpy()}


def _stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales that are exact in the model's type, and not 0."""
    return scales.clamp(min=2.0**-14).to(dtype).float()


def values(found: Arrays) -> np.ndarray:
    """Return the weight (N, K) that codes, scales and zero points stand for, in float32."""
    rows, groups = found["scales"].shape
    codes = found["codes"].reshape(rows, groups, -1).astype(np.float32)
    codes -= found.get("zero_points", np.zeros((rows, groups), np.int8)).astype(np.float32)[..., None]
    return (codes * found["scales"][..., None]).reshape(rows, -1)
