"""Cast every floating-point tensor of a Hugging Face folder to fp16 or bf16, a few rows at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from slipway.model.dtypes import FLOATS
from slipway.model.safetensors_layout import TensorSpec
from slipway.model.weights.reading import Weights, row_pieces
from slipway.stage import Context
from slipway_quantize.checkpoints.weights_file import WeightsFile
from slipway_quantize.companions import read_json, write_json
from slipway_quantize.model_weights import DTYPE_NAMES, cast_to_half, read_rows, read_tensors
from slipway_quantize.pieces import PIECE_WEIGHTS
from slipway_quantize.report import Outcome

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def write_half(weights: Weights, target: Path, *, level: str, max_shard_bytes: int, ctx: Context) -> Outcome:
    """Write a folder's weights in ``level``'s type, and ``target``'s config.json to match.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``, ``WEIGHT_OVERFLOW``, and the reasons of :func:`read_tensors`.
    """
    dtype = HALF[level]
    name = str(dtype).removeprefix("torch.")
    outcome = Outcome(method=f"cast to {name}")
    tensors = read_tensors(weights).values()
    plan = [TensorSpec(t.name, DTYPE_NAMES[dtype] if t.dtype in FLOATS else t.dtype, t.shape) for t in tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    with WeightsFile(target, [[spec] for spec in plan], max_shard_bytes=max_shard_bytes) as file:
        for tensor in tensors:
            for row, count in row_pieces(tensor, PIECE_WEIGHTS):
                values = read_rows(weights, tensor, row, count)
                ctx.progress("cast", done=done, total=total)
                cast = cast_to_half(values, dtype, tensor.name) if values.is_floating_point() else values
                file.write(tensor.name, cast, row=row)
                done += values.nbytes
            if tensor.dtype not in FLOATS:
                outcome.kept[tensor.name] = "not floating point"
            elif tensor.dtype == DTYPE_NAMES[dtype]:
                outcome.kept[tensor.name] = "already in this type"
            else:
                outcome.quantized.append(tensor.name)
    ctx.progress("cast", done=done, total=total)
    if not outcome.quantized:
        ctx.warn(f"the model is already in {level}: the level {level} saves nothing")
    config = read_json(target / "config.json")
    config.pop("torch_dtype", None)  # the older name of the same key
    write_json(target / "config.json", {**config, "dtype": name})
    return outcome
