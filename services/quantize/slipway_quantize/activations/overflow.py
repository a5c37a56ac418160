"""Find the values of a graph that float16 cannot hold on text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.activations.running import TextGraph
from slipway_quantize.activations.text import Text, feeds
from slipway_quantize.graphs.folder import load_graph

HALF_LARGEST = 65504.0
"""The largest number of float16."""
MARGIN = 0.5
"""Share of it that magnitudes on text may reach: other text may have larger ones."""
_PEAK = "peak.{}"


def near_overflow(folder: Path, name: str, values: Collection[str], text: Text, ctx: Context) -> dict[str, float]:
    """Return the largest magnitude on text of each of ``values`` that comes near the end of float16's range or beyond it.

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
        for peak, found in graph.compute(peaks, feeds(graph.inputs, window)).items():
            largest[peak] = max(largest[peak], float("inf") if np.isnan(found) else float(found))
    return {peaks[peak]: value for peak, value in largest.items() if value > MARGIN * HALF_LARGEST}


def refuse_results(beyond: Mapping[str, float], results: Collection[str]) -> None:
    """Refuse results that are float16 and do not fit.

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
    """Let the graph return the largest magnitude of each value; return their names, with that of the value."""
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
