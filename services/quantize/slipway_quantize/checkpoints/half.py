"""Cast every floating-point tensor of a Hugging Face folder to fp16 or bf16, a few rows at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from slipway.stage import Context
from slipway_quantize.checkpoints.checkpoint import Checkpoint, TensorInfo, cast_to_half
from slipway_quantize.checkpoints.weights_file import WeightsFile
from slipway_quantize.companions import read_json, write_json
from slipway_quantize.report import Outcome

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def write_half(source: Path, target: Path, *, level: str, max_shard_bytes: int, ctx: Context) -> Outcome:
    """Write the folder's weights and config.json in ``level``'s type.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``, ``WEIGHT_OVERFLOW``, and the reasons of :class:`Checkpoint`.
    """
    dtype = HALF[level]
    outcome = Outcome(method=f"cast to {str(dtype).removeprefix('torch.')}")
    with Checkpoint(source) as checkpoint:
        plan = [_cast_info(info, dtype) for info in checkpoint.tensors.values()]
        total = sum(info.nbytes for info in checkpoint.tensors.values())
        done = 0
        with WeightsFile(target, [[info] for info in plan], max_shard_bytes=max_shard_bytes) as weights:
            for info in plan:
                for row, values in checkpoint.rows(info.name):
                    ctx.progress("cast", done=done, total=total)
                    cast = cast_to_half(values, dtype, info.name) if values.is_floating_point() else values
                    weights.write(info.name, cast, row=row)
                    done += values.numel() * values.element_size()
                _record(checkpoint.tensors[info.name], dtype, outcome)
        ctx.progress("cast", done=done, total=total)
    if not outcome.quantized:
        ctx.warn(f"the model is already in {level}: the level {level} saves nothing")
    _write_config(target, dtype)
    return outcome


def _cast_info(info: TensorInfo, dtype: torch.dtype) -> TensorInfo:
    return replace(info, dtype=dtype) if info.dtype.is_floating_point else info


def _record(info: TensorInfo, dtype: torch.dtype, outcome: Outcome) -> None:
    if not info.dtype.is_floating_point:
        outcome.kept[info.name] = "not floating point"
    elif info.dtype == dtype:
        outcome.kept[info.name] = "already in this type"
    else:
        outcome.quantized.append(info.name)


def _write_config(target: Path, dtype: torch.dtype) -> None:
    path = target / "config.json"
    config = read_json(path)
    config.pop("torch_dtype", None)  # the older name of the same key
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(path, config)
