"""The quantizers of Slipway's own formats; each imports its libraries when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from slipway.errors import QuantizationError
from slipway.levels import widths_of
from slipway.models.weights.reading import has_weights, open_weights
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
        *,
        inputs: Mapping[str, Path],
        calibration: Calibration | None = None,
    ) -> Outcome:
        """As :meth:`slipway_quantize.quantizer.Quantizer.write`."""
        import torch

        torch.set_num_threads(ctx.threads)
        largest = params.max_shard_bytes
        with closing(open_weights(source, inputs)) as weights:
            if params.integers is None:
                from slipway_quantize.checkpoints.half import write_half

                outcome = write_half(weights, target, level=params.level, max_shard_bytes=largest, ctx=ctx)
            else:
                from slipway_quantize.checkpoints.integer import write_int

                given = params.integers
                outcome = write_int(
                    source,
                    weights,
                    target,
                    given,
                    max_shard_bytes=largest,
                    ctx=ctx,
                    calibration=calibration,
                    widths=widths_of(params.level),
                    budget=params.size_budget,
                )
            if not has_weights(source):
                outcome.left_out_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        return outcome

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
        *,
        inputs: Mapping[str, Path],
        calibration: Calibration | None = None,
    ) -> Outcome:
        """As :meth:`slipway_quantize.quantizer.Quantizer.write`."""
        from slipway_quantize.graphs.contract import restate_contract

        outcome = self._write(source, target, params, ctx, inputs=inputs, calibration=calibration)
        restate_contract(target)
        return outcome

    def _write(
        self,
        source: Path,
        target: Path,
        params: QuantizeParams,
        ctx: Context,
        *,
        inputs: Mapping[str, Path],
        calibration: Calibration | None,
    ) -> Outcome:
        if params.level == "bf16":
            raise QuantizationError(
                "bf16 is not made for ONNX: ONNX Runtime has no bfloat16 matrix product on CPUs, so the model would not load",
                reason="QUANTIZATION_UNSUPPORTED",
                remedy="use fp16, int8 or int4 for ONNX, and bf16 for the PyTorch format",
                about={"format": "onnx", "level": "bf16"},
            )
        from slipway_quantize.graphs.left_out import LeftOutSource

        with LeftOutSource(source, inputs) as left_out:
            if params.integers is not None:
                from slipway_quantize.graphs.integer import write_int

                accuracy = params.accuracy_level
                return write_int(
                    source,
                    target,
                    params.integers,
                    accuracy_level=accuracy,
                    left_out=left_out,
                    ctx=ctx,
                    calibration=calibration,
                    widths=widths_of(params.level),
                    budget=params.size_budget,
                )
            from slipway_quantize.graphs.half import write_half

            return write_half(source, target, left_out=left_out, ctx=ctx)

    def run(self, target: Path, ctx: Context) -> Any:
        """As :meth:`slipway_quantize.quantizer.Quantizer.run`."""
        return run_graph(target, ctx)


CHECKPOINTS, GRAPHS = _Checkpoints(), _Graphs()
