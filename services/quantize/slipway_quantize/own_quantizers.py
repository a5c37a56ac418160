"""The quantizers of Slipway's own formats; each imports its libraries when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.calibrated import Calibration
from slipway_quantize.check import run_checkpoint, run_graph
from slipway_quantize.params import QuantizeParams
from slipway_quantize.report import Outcome


class _Checkpoints:
    """Transformers folders."""

    def write(
        self,
        source: Path,
        target: Path,
        params: QuantizeParams,
        ctx: Context,
        calibration: Calibration | None = None,
    ) -> Outcome:
        """As :meth:`slipway_quantize.quantizer.Quantizer.write`."""
        import torch

        torch.set_num_threads(ctx.threads)
        if params.integers is None:
            from slipway_quantize.checkpoints.half import write_half

            return write_half(source, target, level=params.level, max_shard_bytes=params.max_shard_bytes, ctx=ctx)
        from slipway_quantize.checkpoints.integer import write_int

        most = params.max_shard_bytes
        return write_int(source, target, params.integers, max_shard_bytes=most, ctx=ctx, calibration=calibration)

    def run(self, target: Path, ctx: Context) -> Any:  # noqa: ARG002 - torch's threads are set for the whole stage
        """As :meth:`slipway_quantize.quantizer.Quantizer.run`."""
        return run_checkpoint(target)


class _Graphs:
    """ONNX graphs."""

    def write(
        self,
        source: Path,
        target: Path,
        params: QuantizeParams,
        ctx: Context,
        calibration: Calibration | None = None,
    ) -> Outcome:
        """As :meth:`slipway_quantize.quantizer.Quantizer.write`."""
        from slipway_quantize.graphs.contract import restate_contract

        outcome = self._write(source, target, params, ctx, calibration)
        restate_contract(target)
        return outcome

    def _write(
        self, source: Path, target: Path, params: QuantizeParams, ctx: Context, calibration: Calibration | None
    ) -> Outcome:
        if params.integers is not None:
            from slipway_quantize.graphs.integer import write_int

            accuracy = params.accuracy_level
            return write_int(source, target, params.integers, accuracy_level=accuracy, ctx=ctx, calibration=calibration)
        if params.level == "bf16":
            raise QuantizationError(
                "bf16 is not made for ONNX: ONNX Runtime has no bfloat16 matrix product on CPUs, so the model would not load",
                reason="QUANTIZATION_UNSUPPORTED",
                remedy="use fp16, int8 or int4 for ONNX, and bf16 for the PyTorch format",
                about={"format": "onnx", "level": "bf16"},
            )
        from slipway_quantize.graphs.half import write_half

        return write_half(source, target, ctx=ctx)

    def run(self, target: Path, ctx: Context) -> Any:
        """As :meth:`slipway_quantize.quantizer.Quantizer.run`."""
        return run_graph(target, ctx)


CHECKPOINTS, GRAPHS = _Checkpoints(), _Graphs()
