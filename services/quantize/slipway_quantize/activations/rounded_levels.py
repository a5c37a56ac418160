"""Make the levels that round activations: ``int8_dynamic`` without text, ``int8_static`` and ``fp8_static`` with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.activations.codes import E4M3, INT8, Form
from slipway_quantize.activations.ranges import choose_ranges
from slipway_quantize.activations.running import Text, TextGraph, complete, feeds
from slipway_quantize.activations.trial import measure_divergence, results_of
from slipway_quantize.activations.write import require_opset, write_products
from slipway_quantize.graphs.folder import graph_files, load_graph
from slipway_quantize.graphs.left_out import LeftOutSource
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.report import Outcome

STATIC = {"int8_static": INT8, "fp8_static": E4M3}
"""Levels with ranges measured on text, and the type that they round to."""


def write_level(request: QuantizeRequest, left_out: LeftOutSource, *, dequantized_first: bool = False) -> Outcome:
    """Write the graphs of a request at its level, with the text among its inputs if the level needs it.

    Args:
        request: The request.
        left_out: Weights that the graphs leave out.
        dequantized_first: As in :class:`~slipway_quantize.activations.codes.Form`.

    Raises:
        QuantizationError: With the reasons listed in the package's README.
    """
    source, target, params, ctx = request.source, request.target, request.params, request.ctx
    codes = STATIC.get(params.level)
    if codes is None:
        return write_products(source, target, keep=params.keep, left_out=left_out, ctx=ctx)
    data = request.inputs.get("data")
    if data is None:
        raise QuantizationError(
            f"{params.level} needs text to find the ranges of activations, and there is none",
            reason="CALIBRATION_DATA_INVALID",
            remedy="give text as the input data, or use "
            + ("fp16 or bf16" if dequantized_first else "int8_dynamic or int8"),
        )
    text = Text(data, request.model, seed=params.seed)
    with complete(source, left_out, ctx) as folder:
        name = graph_files(folder)[0]
        require_opset(load_graph(folder, name), name, codes)
        integers = codes is INT8  # floats have small steps for small values, whatever the largest is
        ranges = choose_ranges(
            folder,
            text,
            method=params.activation_ranges if integers else "minmax",
            smoothing=params.smoothing if integers else 0.0,
            keep=params.keep,
            ctx=ctx,
            codes=codes,
        )
        form = Form(codes, dequantized_first=dequantized_first)
        with LeftOutSource(folder, {}) as nothing:
            outcome = write_products(
                folder, target, keep=params.keep, left_out=nothing, ctx=ctx, ranges=ranges, form=form
            )
        outcome.details["divergence"] = float(f"{_divergence(folder, target, text, ctx):.4g}")
        if folder != source:
            outcome.left_out_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return outcome


def _divergence(source: Path, target: Path, text: Text, ctx: Context) -> float:
    """Return the mean divergence of the result from its source on held-out windows."""
    models = [load_graph(folder, graph_files(folder)[0]) for folder in (source, target)]
    names = results_of(models[0], text.family)
    graphs = [TextGraph(model, folder, ctx) for model, folder in zip(models, (source, target), strict=True)]
    divergences = []
    for window in text.held_out:
        exact, rounded = (graph.compute(names, feeds(graph.inputs, window)) for graph in graphs)
        divergences.append(measure_divergence(exact, rounded, text.family))
    return float(np.mean(divergences))
