"""Make fp16 with text: values that float16 cannot hold on it stay float32 in a graph, and are an error in a transformers folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from slipway.errors import QuantizationError
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway.texts import counted
from slipway_quantize.activations.running import Text, TextGraph, complete, feeds
from slipway_quantize.activations.trial import measure_divergence, results_of
from slipway_quantize.graphs.folder import graph_files, load_graph
from slipway_quantize.graphs.half import half_values, write_half
from slipway_quantize.graphs.left_out import LeftOutSource
from slipway_quantize.quantizer import QuantizeRequest
from slipway_quantize.report import Outcome

_WINDOWS = 64
_SHOWN = 4

HALF_LARGEST = 65504.0
"""The largest number of float16."""
MARGIN = 0.5
"""Share of it that magnitudes on text may reach: other text may have larger ones."""
_PEAK = "peak.{}"


def write_half_graph(request: QuantizeRequest, left_out: LeftOutSource, data: Path) -> Outcome:
    """Write the only graph of a request in float16, but values that come near the end of its range on text in float32.

    A model that cannot be run on text is written as if there were none.

    Raises:
        QuantizationError: ``NON_FINITE_OUTPUT``, and the reasons of :func:`~slipway_quantize.graphs.half.write_half`.
    """
    source, target, ctx = request.source, request.target, request.ctx
    try:
        text = Text(data, request.model, seed=request.params.seed, windows=_WINDOWS)
        return _write_on_text(source, target, text, left_out, ctx)
    except QuantizationError as error:
        if error.reason != "CALIBRATION_UNSUPPORTED":
            raise
        ctx.log.info(f"activations are not compared with the range of float16: {error.message}")
        outcome = write_half(source, target, left_out=left_out, ctx=ctx)
        outcome.details["overflow"] = {"not_run": error.message}
        return outcome


def _write_on_text(source: Path, target: Path, text: Text, left_out: LeftOutSource, ctx: Context) -> Outcome:
    with complete(source, left_out, ctx) as folder:
        name = graph_files(folder)[0]
        model = load_graph(folder, name)
        results = results_of(model, text.family)
        beyond = near_overflow(folder, name, half_values(model), text, ctx)
        refuse_results(beyond, [str(value.name) for value in model.graph.outputs])
        with LeftOutSource(folder, {}) as nothing:
            outcome = write_half(folder, target, left_out=nothing, ctx=ctx, wide=beyond)
        if folder != source:
            outcome.left_out_bytes = sum(path.stat().st_size for path in folder.iterdir())
        outcome.details["overflow"] = {
            "text": text.digest,
            "windows": len(text.fit) + len(text.held_out),
            "margin": MARGIN,
            "float32": {each: float(f"{value:.5g}") for each, value in sorted(beyond.items())},
            "divergence": float(f"{_divergence(folder, target, results, text, ctx):.4g}"),
        }
    if beyond:
        worst = max(beyond, key=lambda each: beyond[each])
        ctx.warn(
            f"{counted(len(beyond), 'value')} of the graph stay float32, because they come near the end of float16's range on the "
            f"calibration text: {worst} reaches {beyond[worst]:.5g}"
        )
    return outcome


def _divergence(source: Path, target: Path, results: list[str], text: Text, ctx: Context) -> float:
    """Return the mean divergence on held-out windows.

    Raises:
        QuantizationError: ``NON_FINITE_OUTPUT``.
    """
    graphs = [TextGraph(load_graph(folder, graph_files(folder)[0]), folder, ctx) for folder in (source, target)]
    divergences = []
    for window in text.held_out:
        exact, half = (graph.compute(results, feeds(graph.inputs, window)) for graph in graphs)
        _require_finite(half)
        divergences.append(measure_divergence(exact, half, text.family))
    return float(np.mean(divergences))


def _require_finite(results: dict[str, Any]) -> None:
    wrong = next((name for name, values in results.items() if not np.isfinite(values).all()), None)
    if wrong:
        raise QuantizationError(
            f"{wrong} is NaN or infinite on the calibration text",
            reason="NON_FINITE_OUTPUT",
            remedy="use int8 or int4 for ONNX, or bf16 for the PyTorch format",
            about={"output": wrong},
        )


def check_half_checkpoint(target: Path, data: Path, *, seed: int, ctx: Context) -> dict[str, Any]:
    """Run a transformers folder of float16 weights on text, computing in float32; return facts about the largest activations.

    All layers have one type, because transformers loads a folder in one.

    Raises:
        QuantizationError: ``NON_FINITE_OUTPUT``: activations exceed the range of float16; their modules are named.
    """
    from slipway_quantize.activations.peaks import module_peaks

    try:
        peaks, digest, windows = module_peaks(ModelFolder.open(target), data, seed=seed, windows=_WINDOWS, ctx=ctx)
    except QuantizationError as error:
        if error.reason != "CALIBRATION_UNSUPPORTED":
            raise
        ctx.log.info(f"activations are not compared with the range of float16: {error.message}")
        return {"not_run": error.message}
    beyond = {name: peak for name, peak in peaks.items() if not peak <= HALF_LARGEST}
    near = {name: float(f"{peak:.5g}") for name, peak in peaks.items() if MARGIN * HALF_LARGEST < peak <= HALF_LARGEST}
    if beyond:
        shown = ", ".join(f"{name} ({peak:.5g})" for name, peak in list(beyond.items())[:_SHOWN])
        raise QuantizationError(
            f"activations exceed float16's {HALF_LARGEST:.0f} on the calibration text in {counted(len(beyond), 'place')}: {shown}",
            reason="NON_FINITE_OUTPUT",
            remedy="use bf16, which has the range of float32, or fp16 for ONNX, which keeps these layers in float32",
            about={"modules": ",".join(list(beyond)[:_SHOWN])},
        )
    if near:
        worst = max(near, key=lambda name: near[name])
        ctx.warn(
            f"activations in {counted(len(near), 'place')} come near float16's {HALF_LARGEST:.0f} on the calibration text "
            f"({worst} reaches {near[worst]}); bf16 has the range of float32"
        )
    return {
        "text": digest,
        "windows": windows,
        "margin": MARGIN,
        "near": near,
        "largest": float(f"{max(peaks.values()):.5g}"),
    }


def near_overflow(folder: Path, name: str, values: Collection[str], text: Text, ctx: Context) -> dict[str, float]:
    """Return the largest magnitude on text of each value that comes near the end of float16's range or exceeds it.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``, ``QUANTIZATION_FAILED``.
    """
    model = load_graph(folder, name)
    peaks = _return_peaks(model, values)
    graph = TextGraph(model, folder, ctx)
    largest = dict.fromkeys(peaks, 0.0)
    windows = [*text.fit, *text.held_out]
    for number, window in enumerate(windows):
        ctx.progress("ranges", done=number, total=len(windows), unit="windows")
        for peak, magnitude in graph.compute(peaks, feeds(graph.inputs, window)).items():
            largest[peak] = max(largest[peak], float("inf") if np.isnan(magnitude) else float(magnitude))
    return {peaks[peak]: value for peak, value in largest.items() if value > MARGIN * HALF_LARGEST}


def refuse_results(beyond: Mapping[str, float], results: Collection[str]) -> None:
    """Refuse a graph whose results exceed float16.

    Raises:
        QuantizationError: ``NON_FINITE_OUTPUT``.
    """
    wrong = sorted(name for name in results if beyond.get(name, 0.0) > HALF_LARGEST)
    if wrong:
        raise QuantizationError(
            f"{wrong[0]} reaches {beyond[wrong[0]]:.6g} on the calibration text, and float16 holds {HALF_LARGEST:.0f}",
            reason="NON_FINITE_OUTPUT",
            remedy="use int8, int8_dynamic or int4 for ONNX, or bf16 for the PyTorch format",
            about={"output": wrong[0]},
        )


def _return_peaks(model: ir.Model, values: Collection[str]) -> dict[str, str]:
    """Make the graph return the largest magnitude of each value; return the value's name by that of the new output."""
    peaks: dict[str, str] = {}
    for node in list(model.graph):
        for value in node.outputs:
            if value.name not in values:
                continue
            magnitude = ir.node("Abs", [value])
            peak = ir.node("ReduceMax", magnitude.outputs, {"keepdims": 0})
            result = peak.outputs[0]
            result.name = _PEAK.format(len(peaks))
            result.type, result.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
            model.graph.insert_after(node, [magnitude, peak])
            model.graph.outputs.append(result)
            peaks[result.name] = str(value.name)
    return peaks
