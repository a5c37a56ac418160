"""The quantizers of Slipway's own formats; each imports its libraries when it is used."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from slipway.levels import LEVELS, widths_of
from slipway.model.weights.reading import has_weights, open_weights
from slipway.stage import Context
from slipway_quantize.check import run_checkpoint, run_graph
from slipway_quantize.levels import CASTS
from slipway_quantize.model_weights import limit_torch
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.report import Outcome


class _Checkpoints:
    """Transformers folders."""

    def write(self, request: QuantizeRequest) -> Outcome:
        """As :meth:`slipway_quantize.quantizer.Quantizer.write`."""
        params, ctx = request.params, request.ctx
        with closing(open_weights(request.source, request.inputs)) as weights:
            if params.level in CASTS:
                from slipway_quantize.checkpoints.weights_file import write_half

                largest = params.max_shard_bytes
                outcome = write_half(
                    weights,
                    request.target,
                    level=params.level,
                    max_shard_bytes=largest,
                    ctx=ctx,
                    work=request.work,
                )
                if "data" in request.inputs and params.level == "fp16":
                    limit_torch(ctx.threads)
                    from slipway_quantize.activations.halves import check_half_checkpoint

                    overflow = check_half_checkpoint(request.target, request.inputs["data"], seed=params.seed, ctx=ctx)
                    outcome.details["overflow"] = overflow
            else:
                from slipway_quantize.checkpoints.compressed import write_compressed
                from slipway_quantize.checkpoints.openai import is_openai_mxfp4, write_openai_mxfp4

                write = write_openai_mxfp4 if is_openai_mxfp4(request) else write_compressed
                outcome = write(request, weights)
            if not has_weights(request.source):
                outcome.left_out_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        return outcome

    def run(self, target: Path, ctx: Context) -> Any:
        """As :meth:`slipway_quantize.quantizer.Quantizer.run`."""
        limit_torch(ctx.threads)
        return run_checkpoint(target)


class _Graphs:
    """ONNX graphs.

    Args:
        dequantized_first: As in :class:`~slipway_quantize.activations.codes.Form`.
    """

    def __init__(self, *, dequantized_first: bool = False) -> None:
        self._dequantized_first = dequantized_first

    def write(self, request: QuantizeRequest) -> Outcome:
        """As :meth:`slipway_quantize.quantizer.Quantizer.write`."""
        from slipway_quantize.graphs.folder import restate_contract, take_data_in
        from slipway_quantize.graphs.pictures import copy_encoder

        outcome = self._write(request)
        copy_encoder(request.source, request.target, outcome, level=request.params.level)
        restate_contract(request.target)
        if not request.params.external_data:
            take_data_in(request.target)
        return outcome

    def _write(self, request: QuantizeRequest) -> Outcome:
        from slipway_quantize.graphs.left_out import LeftOutSource

        source, target, params, ctx = request.source, request.target, request.params, request.ctx
        with LeftOutSource(source, request.inputs) as left_out:
            if LEVELS[params.level].activations:
                from slipway_quantize.activations.rounded_levels import write_level

                return write_level(request, left_out, dequantized_first=self._dequantized_first)
            if params.integers is not None:
                from slipway_quantize.graphs.integer_graph import write_int

                return write_int(
                    source,
                    target,
                    params.integers,
                    config=request.model.config,
                    accuracy_level=params.accuracy_level,
                    left_out=left_out,
                    ctx=ctx,
                    calibration=request.calibration,
                    widths=widths_of(params.level),
                    budget=request.size_budget,
                    head_bits=params.head_bits,
                )
            if "data" in request.inputs and params.level == "fp16":
                from slipway_quantize.activations.halves import write_half_graph

                return write_half_graph(request, left_out, request.inputs["data"])
            from slipway_quantize.graphs.half import HALVES, write_half

            return write_half(source, target, left_out=left_out, ctx=ctx, half=HALVES[params.level])

    def run(self, target: Path, ctx: Context) -> Any:
        """As :meth:`slipway_quantize.quantizer.Quantizer.run`."""
        return run_graph(target, ctx)


CHECKPOINTS, GRAPHS, GRAPHS_FOR_TENSORRT = _Checkpoints(), _Graphs(), _Graphs(dequantized_first=True)
