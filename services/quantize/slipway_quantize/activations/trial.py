"""Try ranges of activations: one graph whose values are rounded as its inputs say, compared with itself on held-out windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from slipway.model.families import Comparison, Family
from slipway.stage import Context
from slipway_quantize.activations.codes import INT8, Array, Codes, Range
from slipway_quantize.activations.running import Text, TextGraph, feeds, unsupported_error
from slipway_quantize.graphs.folder import add_initializer, graph_files, load_graph

_ROWS = 8
"""Positions that are compared at once: six arrays of their results in float64, 58 MB together with 150,000 tokens."""
_STEP, _EXACT, _NOISE = "trial.{}.step", "trial.{}.exact", "trial.{}.noise"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The effect of a choice on the held-out windows.

    Attributes:
        divergence: Mean divergence of the results.
        noise: Rounding error of each value as a share of each token's energy, by the value's name.
    """

    divergence: float
    noise: Mapping[str, float]


class Trial:
    """A graph in which each value can be rounded, with any step.

    Args:
        folder: Folder with the graph and its weights.
        factors: Divisors of features, if there are any, by the name of each value.
        text: The text.
        ctx: Context of the stage.
        codes: The type that values are rounded to.
    """

    def __init__(
        self, folder: Path, factors: Mapping[str, Array | None], text: Text, ctx: Context, *, codes: Codes = INT8
    ) -> None:
        self._names, self._text, self._codes = list(factors), text, codes
        model = load_graph(folder, graph_files(folder)[0])
        self._results = results_of(model, text.family)
        for number, name in enumerate(self._names):
            _round(model, name, number, factors[name], codes)
        self._graph, self._ctx = TextGraph(model, folder, ctx), ctx

    def divergences(self, choices: Sequence[tuple[Mapping[str, Range], frozenset[str]]]) -> list[TrialResult]:
        """Return the effects of choices: ranges, each with the values that stay exact."""
        windows = self._text.held_out
        divergence = np.zeros(len(choices))
        noise = np.zeros((len(choices), len(self._names)))
        noises = [_NOISE.format(number) for number in range(len(self._names))]
        for done, window in enumerate(windows):
            self._ctx.progress("compare", done=done, total=len(windows), unit="windows")
            given = feeds([each for each in self._graph.inputs if not each.name.startswith("trial.")], window)
            exact = self._graph.compute(self._results, given | self._switches({}, frozenset(self._names)))
            for number, (ranges, kept) in enumerate(choices):
                results = self._graph.compute([*self._results, *noises], given | self._switches(ranges, kept))
                divergence[number] += measure_divergence(exact, results, self._text.family) / len(windows)
                noise[number] += np.array([float(results[name]) for name in noises]) / len(windows)
        return [
            TrialResult(float(divergence[number]), dict(zip(self._names, map(float, noise[number]), strict=True)))
            for number in range(len(choices))
        ]

    def _switches(self, ranges: Mapping[str, Range], kept: frozenset[str]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for number, name in enumerate(self._names):
            step = self._codes.step(ranges[name].largest) if name in ranges else 1
            made[_STEP.format(number)] = np.array(step, np.float32)
            made[_EXACT.format(number)] = np.array(name in kept)
        return made


def results_of(model: ir.Model, family: Family) -> list[str]:
    """Return the names of the results to compare.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``: the graph has none.
    """
    names = [str(value.name) for value in model.graph.outputs if value.name in family.outputs]
    if not names:
        raise unsupported_error(f"the graph has none of the outputs {', '.join(family.outputs)}")
    return names


def measure_divergence(exact: Mapping[str, Array], found: Mapping[str, Array], family: Family) -> float:
    """Return the divergence of the second from the first: KL in nats, for embeddings the relative squared error."""
    parts = [(exact[name], found[name]) for name in exact if name in family.outputs]
    if family.comparison is Comparison.EMBEDDINGS:
        wide = [(one.astype(np.float64), other.astype(np.float64)) for one, other in parts]
        return sum(float(np.sum((p - q) ** 2) / np.sum(p**2)) for p, q in wide) / len(parts)
    return sum(_mean_divergence(one, other) for one, other in parts) / len(parts)


def _mean_divergence(one: Array, other: Array) -> float:
    """Return the mean divergence over positions, with a few of them in float64 at once. (…, values) each."""
    rows, others = (each.reshape(-1, each.shape[-1]) for each in (one, other))
    total = 0.0
    for start in range(0, len(rows), _ROWS):
        p, q = (_log_softmax(each[start : start + _ROWS].astype(np.float64)) for each in (rows, others))
        total += float(np.sum(np.exp(p) * (p - q)))
    return total / len(rows)


def _log_softmax(values: Array) -> Array:
    shifted = values - values.max(axis=-1, keepdims=True)
    made: Array = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return made


def _round(model: ir.Model, name: str, number: int, factors: Array | None, codes: Codes) -> None:
    """Make products read a value rounded, unless an input says that it stays exact; add its noise to the graph's outputs."""
    graph = model.graph
    value = next(value for node in graph for value in node.outputs if value.name == name)
    users = [(node, index) for node, index in value.uses() if node.op_type in {"MatMul", "Gemm"} and index == 0]
    step = ir.Value(name=_STEP.format(number), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    exact = ir.Value(name=_EXACT.format(number), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    graph.inputs.extend([step, exact])
    zero = _constant(model, f"trial.{number}.zero", codes.zeros())
    by = _constant(model, f"trial.{number}.factors", np.array(1 if factors is None else factors, np.float32))
    axes = _constant(model, f"trial.{number}.axes", np.array([-1], np.int64))
    least = _constant(model, f"trial.{number}.least", np.array(1e-12, np.float32))
    divided = ir.node("Div", [value, by])
    integers = ir.node("QuantizeLinear", [divided.outputs[0], step, zero])
    back = ir.node("DequantizeLinear", [integers.outputs[0], step, zero])
    rounded = ir.node("Mul", [back.outputs[0], by])
    used = ir.node("Where", [exact, value, rounded.outputs[0]])
    added = ir.node("Sub", [rounded.outputs[0], value])
    squares = [ir.node("Mul", [each, each]) for each in (added.outputs[0], value)]
    energies = [ir.node("ReduceSum", [each.outputs[0], axes], {"keepdims": 0}) for each in squares]
    floored = ir.node("Max", [energies[1].outputs[0], least])
    share = ir.node("Div", [energies[0].outputs[0], floored.outputs[0]])
    noise = ir.node("ReduceMean", [share.outputs[0]], {"keepdims": 0})
    producer = value.producer()
    assert producer is not None
    graph.insert_after(
        producer, [divided, integers, back, rounded, used, added, *squares, *energies, floored, share, noise]
    )
    for node, index in users:
        node.replace_input_with(index, used.outputs[0])
    result = noise.outputs[0]
    result.name, result.type, result.shape = _NOISE.format(number), ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    graph.outputs.append(result)


def _constant(model: ir.Model, name: str, values: Any) -> ir.Value:
    return add_initializer(model, ir.tensor(values, name=name))
