"""One quantization from start to end: check what was given, write the weights, copy the rest, report, check the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.check import check_result
from slipway_quantize.companions import copy_companions, read_json, write_json
from slipway_quantize.levels import BITS, IntLevel
from slipway_quantize.params import QuantizeParams
from slipway_quantize.report import Outcome, write_report


def quantize(source: Path, target: Path, params: QuantizeParams, ctx: Context) -> None:
    """Write ``source`` at ``params.level`` into the empty folder ``target``.

    Raises:
        QuantizationError: With the reasons the package's README lists.
    """
    torch.set_num_threads(max(1, ctx.threads))
    _refuse_quantized(source)
    copy_companions(source, target)
    write = _write_pytorch if params.format == "pytorch" else _write_onnx
    outcome = write(source, target, params, ctx)
    settings: dict[str, Any] = {"format": params.format, "level": params.level}
    if params.level in BITS:
        settings |= {"group_size": params.group_size, "packed": params.packed}
    if params.format == "onnx":
        _note_precision(target / "onnx_export.json", params.level)
    write_report(source, target, outcome, settings=settings, ctx=ctx)
    if params.check:
        check_result(source, target, model_format=params.format, ctx=ctx)


def _write_pytorch(source: Path, target: Path, params: QuantizeParams, ctx: Context) -> Outcome:
    if params.level in ("fp16", "bf16"):
        from slipway_quantize.checkpoints.half import write_half

        return write_half(source, target, level=params.level, max_shard_bytes=params.max_shard_bytes, ctx=ctx)
    from slipway_quantize.checkpoints.integer import write_int

    level = IntLevel(bits=BITS[params.level], group_size=params.group_size, packed=params.packed)
    return write_int(source, target, level, max_shard_bytes=params.max_shard_bytes, ctx=ctx)


def _write_onnx(source: Path, target: Path, params: QuantizeParams, ctx: Context) -> Outcome:
    if params.level in BITS:
        from slipway_quantize.graphs.integer import write_int

        level = IntLevel(bits=BITS[params.level], group_size=params.group_size, packed=params.packed)
        return write_int(source, target, level, accuracy_level=params.accuracy_level, ctx=ctx)
    if params.level == "bf16":
        raise QuantizationError(
            "bf16 is not made for ONNX: ONNX Runtime has no bfloat16 matrix product on CPUs, so the model would not load",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use fp16, int8 or int4 for ONNX, and bf16 for the PyTorch format",
            about={"format": "onnx", "level": "bf16"},
        )
    from slipway_quantize.graphs.half import write_half

    return write_half(source, target, ctx=ctx)


def _note_precision(path: Path, level: str) -> None:
    """The copied description of the export must not go on calling the model float32."""
    if path.is_file():
        write_json(path, {**read_json(path), "precision": level})


def _refuse_quantized(source: Path) -> None:
    config = read_json(source / "config.json")
    report = source / "quantization.json"
    found = read_json(report).get("level") if report.is_file() else None
    found = found or (config.get("quantization_config") or {}).get("quant_method")
    if found:
        raise QuantizationError(
            f"the model is quantized already ({found})",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="quantize the merged or exported model in its original precision",
            about={"quantization": found},
        )
