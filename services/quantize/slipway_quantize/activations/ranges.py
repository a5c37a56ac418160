"""Choose the ranges of activations from histograms on text, and the products that keep their type.

A range is the largest magnitude, a percentile, or the one with the least loss of information. Products keep their type by the divergence
on held-out windows. A histogram's number of bins stays the same: if a larger magnitude comes, neighbouring bins are joined until it fits.

Axes: T tokens, K features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.activations.codes import INT8, Array, Codes, Range, Ranges, largest_inputs
from slipway_quantize.activations.running import Text, TextGraph, feeds
from slipway_quantize.activations.trial import Trial
from slipway_quantize.activations.write import inputs_of
from slipway_quantize.graphs.folder import graph_files, load_graph, read_constant
from slipway_quantize.graphs.weights import Weight, find_weights, is_kept

_LEAST_FACTOR = 1e-5
GOOD_DIVERGENCE = 1e-3
"""Divergence on held-out windows below which all products are rounded."""
_WORTH = 0.7
"""Keeping the type of twice as many products must lower the divergence to this share; otherwise it is not worth their size."""
_MOST_KEPT = 4
"""One value in so many may keep its type, at most."""

RANGE_METHODS = ("minmax", "entropy", "percentile")
BINS = 2048
_PERCENTILE = 0.99999
"""Share of the values inside the range: with much less, the few large features of language models are cut off."""
_INT8_LEVELS = 128
"""Magnitudes that an integer of eight bits with a sign has."""
_FLOOR = 1e-9
_LEAST_END = 2.0**-60


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that products read, with the weights it is multiplied by."""

    name: str
    weights: tuple[Weight, ...]

    @property
    def smoothable(self) -> bool:
        """Whether its weights can take factors: nothing else computes with them."""
        return all(not weight.lookups and inputs_of(weight) == [self.name] for weight in self.weights)


def choose_ranges(
    folder: Path,
    text: Text,
    *,
    method: str,
    smoothing: float,
    keep: Sequence[str],
    ctx: Context,
    codes: Codes = INT8,
) -> Ranges:
    """Return the ranges of a graph's activations.

    Args:
        folder: Folder with one graph, whose weights are all there.
        text: The text.
        method: ``minmax``, ``entropy``, ``percentile``, or ``auto`` for the best of them.
        smoothing: Share of the outliers that move into the weights; 0: none.
        keep: Names of linear layers that keep their type.
        ctx: Context of the stage.
        codes: The type that activations are rounded to.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``, ``NON_FINITE_OUTPUT``, ``QUANTIZATION_FAILED``.
    """
    model = load_graph(folder, graph_files(folder)[0])
    values = _values(model, keep)
    factors, histograms = _observe(folder, values, text, smoothing, ctx)
    methods = RANGE_METHODS if method == "auto" else (method,)
    by_method = {
        each: {name: Range(histogram.range(each), factors.get(name)) for name, histogram in histograms.items()}
        for each in methods
    }
    trial = Trial(folder, {name: factors.get(name) for name in histograms}, text, ctx, codes=codes)
    tried = trial.divergences([(by_method[each], frozenset()) for each in methods])
    divergence = {each: result.divergence for each, result in zip(methods, tried, strict=True)}
    chosen = min(methods, key=lambda each: divergence[each])
    best = tried[methods.index(chosen)]
    kept, steps = _find_sensitive(trial, by_method[chosen], best.noise, best.divergence)
    facts = {
        "activations": {
            "method": chosen,
            "smoothing": smoothing,
            "text": text.digest,
            "windows": len(text.fit),
            "held_out_windows": len(text.held_out),
            "divergence": {each: _shorten(value) for each, value in divergence.items()},
            "divergence_by_kept": {str(count): _shorten(value) for count, value in steps.items()},
        }
    }
    reason = f"keeping it lowers the divergence on held-out text from {steps[0]:.2e} to {steps[len(kept)]:.2e}, with {len(kept)} like it"
    return Ranges(by_method[chosen], dict.fromkeys(sorted(kept), reason), facts)


def _values(model: ir.Model, keep: Sequence[str]) -> dict[str, _Value]:
    """Return the values that products read, by name, in the order of the graph."""
    readers: dict[str, list[Weight]] = {}
    for weight in find_weights(model.graph):
        if not is_kept(weight.name, keep):
            for name in inputs_of(weight):
                readers.setdefault(name, []).append(weight)
    return {name: _Value(name, tuple(weights)) for name, weights in readers.items()}


def _observe(
    folder: Path, values: Mapping[str, _Value], text: Text, smoothing: float, ctx: Context
) -> tuple[dict[str, Array], dict[str, Histogram]]:
    """Return the factors of each value, and the histogram of its magnitudes after the division by them."""
    model = load_graph(folder, graph_files(folder)[0])
    _add_outputs(model, values)
    graph = TextGraph(model, folder, ctx)
    total = (2 if smoothing else 1) * len(text.fit)
    factors: dict[str, Array] = {}
    if smoothing:
        largest: dict[str, Array] = {}
        for number, window in enumerate(text.fit):
            ctx.progress("ranges", done=number, total=total, unit="windows")
            for name, array in graph.compute(values, feeds(graph.inputs, window)).items():
                _require_finite(array, name)
                top = np.abs(array.reshape(-1, array.shape[-1])).max(axis=0)  # (K,)
                largest[name] = np.maximum(largest[name], top) if name in largest else top
        for name, value in values.items():
            if value.smoothable:
                factors[name] = _smoothing_factors(folder, value, largest[name], smoothing)
    histograms = {name: Histogram() for name in values}
    for number, window in enumerate(text.fit):
        ctx.progress("ranges", done=total - len(text.fit) + number, total=total, unit="windows")
        for name, array in graph.compute(values, feeds(graph.inputs, window)).items():
            _require_finite(array, name)
            histograms[name].add(array / factors[name] if name in factors else array)
    ctx.progress("ranges", done=total, total=total, unit="windows")
    return factors, histograms


def _require_finite(values: Array, name: str) -> None:
    if not np.isfinite(values).all():
        raise QuantizationError(
            f"{name!r}, which a product reads, is NaN or infinite on the calibration text",
            reason="NON_FINITE_OUTPUT",
            remedy="the training diverged, or the text is unusual: use an earlier checkpoint, or other text",
            about={"value": name},
        )


def _add_outputs(model: ir.Model, names: Mapping[str, object]) -> None:
    known = {value.name for value in model.graph.outputs} | {value.name for value in model.graph.inputs}
    for node in model.graph:
        for value in node.outputs:
            if value.name in names and value.name not in known:
                value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
                model.graph.outputs.append(value)


def _smoothing_factors(folder: Path, value: _Value, largest: Array, strength: float) -> Array:
    """Return the divisor of each feature, which moves its outliers into the weights. Source: SmoothQuant, arXiv 2211.10438, eq. 4."""
    weights = [largest_inputs(weight, read_constant(folder, weight.value.const_value)) for weight in value.weights]
    of_weights = np.maximum.reduce(weights)  # (K,)
    divisors = np.maximum(largest, _LEAST_FACTOR) ** strength / np.maximum(of_weights, _LEAST_FACTOR) ** (1 - strength)
    silent = (largest == 0) | (of_weights == 0)
    made: Array = np.where(silent, 1, np.clip(divisors, _LEAST_FACTOR, 1 / _LEAST_FACTOR)).astype(np.float32)
    return made


def _find_sensitive(
    trial: Trial, ranges: Mapping[str, Range], noise: Mapping[str, float], divergence: float
) -> tuple[frozenset[str], dict[int, float]]:
    """Return the values that keep their type, and the divergence by their number.

    Try the values with the noisiest rounding first, twice as many each time, as long as that is needed and pays.
    """
    order = sorted(noise, key=lambda name: (-noise[name], name))
    steps, kept, count = {0: divergence}, frozenset[str](), 1
    while divergence > GOOD_DIVERGENCE and count <= max(1, len(order) // _MOST_KEPT):
        more = frozenset(order[:count])
        [tried] = trial.divergences([(ranges, more)])
        steps[count] = tried.divergence
        if tried.divergence <= _WORTH * divergence:
            kept, divergence = more, tried.divergence
        count *= 2
    return kept, steps


def _shorten(value: float) -> float:
    return float(f"{value:.4g}")


class Histogram:
    """Magnitudes of one value.

    Attributes:
        largest: The largest.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._end = 0.0
        self._counts = np.zeros(BINS, np.int64)

    def add(self, values: Array) -> None:
        """Count values of any shape; all are finite."""
        magnitudes = np.abs(values.ravel())
        top = float(magnitudes.max(initial=0.0))
        self.largest = max(self.largest, top)
        if top == 0.0 and self._end == 0.0:
            self._counts[0] += magnitudes.size
            return
        if self._end == 0.0:
            self._end = max(_LEAST_END, 2.0 ** math.ceil(math.log2(top)))
        while top > self._end:
            joined = self._counts.reshape(-1, 2).sum(axis=1)
            self._counts = np.concatenate([joined, np.zeros(BINS // 2, np.int64)])
            self._end *= 2
        index = np.minimum((magnitudes * np.float32(BINS / self._end)).astype(np.int32), BINS - 1)
        self._counts += np.bincount(index, minlength=BINS)

    def range(self, method: str) -> float:
        """Return the magnitude that the largest integer should stand for."""
        match method:
            case "percentile":
                magnitude = self._percentile()
            case "entropy":
                magnitude = self._entropy()
            case _:
                magnitude = self.largest
        return min(magnitude, self.largest)

    def _percentile(self) -> float:
        inside = np.searchsorted(self._counts.cumsum(), _PERCENTILE * self._counts.sum())
        return (int(inside) + 1) * self._end / BINS

    def _entropy(self) -> float:
        """Return the range whose quantized distribution diverges least from the counted one (TensorRT's calibration)."""
        used = int(np.flatnonzero(self._counts)[-1]) + 1 if self._counts.any() else 1
        counts = self._counts.astype(np.float64)
        counts[0] = min(counts[0], counts[1])  # every range holds all zeros
        best, chosen = math.inf, used
        for width in range(min(_INT8_LEVELS, used), used + 1, 8):
            divergence = _information_loss(counts[:used], width)
            if divergence < best:
                best, chosen = divergence, width
        return chosen * self._end / BINS


def _information_loss(counts: Array, width: int) -> float:
    """Return the divergence of the clipped and quantized counts from the clipped ones."""
    clipped = counts[:width].copy()
    clipped[-1] += counts[width:].sum()
    level = np.minimum(np.arange(width) * _INT8_LEVELS // width, _INT8_LEVELS - 1)
    filled = counts[:width] > 0
    inside = np.bincount(level, weights=counts[:width], minlength=_INT8_LEVELS)
    sizes = np.bincount(level, weights=filled, minlength=_INT8_LEVELS)
    spread = np.where(filled, (inside / np.maximum(sizes, 1))[level], 0.0)
    if not clipped.sum() or not spread.sum():
        return math.inf
    p, q = clipped / clipped.sum(), spread / spread.sum()
    return float(np.sum(np.where(p > 0, p * np.log(np.maximum(p, _FLOOR) / np.maximum(q, _FLOOR)), 0.0)))
