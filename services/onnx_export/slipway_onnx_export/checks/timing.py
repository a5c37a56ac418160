"""Measure what the optimization of a graph gains: the time of a prompt and of a token, without and with it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from slipway.machine.processes import session_options
from slipway.proof.onnx_errors import ORT_ERRORS
from slipway_onnx_export.checks.written import SOUND_SAMPLES, UnknownAxisError, make_feed
from slipway_onnx_export.engines import Engine
from slipway_onnx_export.interface import EngineGraph, GraphRequest, room_of
from slipway_onnx_export.names import BATCH, CACHE, FRAMES, PAST, SAMPLES, SEQUENCE, SOURCE, TOTAL
from slipway_onnx_export.serving.variant import serve
from slipway_onnx_export.source import ModelSource
from slipway_onnx_export.writing.graph import declare_interface, normalize_graph
from slipway_onnx_export.writing.weights import DATA_SUFFIX, stream_weights

Times = Mapping[str, Mapping[str, float]]
"""Milliseconds of ``prefill`` and ``decode``, ``before`` and ``after``."""

TOKENS, ROUNDS = 32, 5
"""Tokens of a prompt and of the past, and rounds, in which both graphs run in turn."""

_PLAIN = "unoptimized_"


class NotMeasuredError(Exception):
    """The optimization of this export cannot be measured. The message says why."""


def time_optimization(
    graphs: Sequence[EngineGraph],
    source: ModelSource,
    *,
    engine: Engine,
    request: GraphRequest,
    folder: Path,
    threads: int,
    end: int | None,
) -> Times:
    """Make the graphs again without optimization, beside the written ones, and run both.

    Sessions are opened as a program does: ONNX Runtime makes its own optimizations in both. Weights that both have are stored once.

    Args:
        graphs: The written graphs.
        source: The model.
        engine: The engine that made them.
        request: The request to that engine.
        folder: Folder of the graphs. It is left as it was.
        threads: Threads of each session.
        end: Token that ends a text, if the model has one.

    Raises:
        NotMeasuredError: There is no optimization, or nothing to compare it with.
    """
    if request.optimization == "none":
        raise NotMeasuredError("graphs are not optimized")
    if request.layered or request.pictures:
        what = "in layers" if request.layered else "with graphs for images"
        raise NotMeasuredError(f"a model {what} is not run whole")
    plain = [_PLAIN + made.component.file for made in graphs]
    try:
        _write_plain(graphs, source, engine=engine, request=request, folder=folder, threads=threads)
        tokens = min(TOKENS, room_of(source) // 2)
        pairs = [
            {"before": _TimedGraph(folder / name, threads), "after": _TimedGraph(folder / made.component.file, threads)}
            for made, name in zip(graphs, plain, strict=True)
        ]
        return _measure(pairs, tokens=max(1, tokens), end=end)
    except UnknownAxisError as why:
        raise NotMeasuredError(str(why)) from why
    except ORT_ERRORS as error:
        raise NotMeasuredError(f"onnxruntime cannot run a graph: {str(error).splitlines()[0][:200]}") from error
    finally:
        for name in plain:
            (folder / name).unlink(missing_ok=True)
            (folder / (name + DATA_SUFFIX)).unlink(missing_ok=True)


def _write_plain(
    graphs: Sequence[EngineGraph],
    source: ModelSource,
    *,
    engine: Engine,
    request: GraphRequest,
    folder: Path,
    threads: int,
) -> None:
    """Write the graphs without optimization; they read the weights of the optimized ones where those are the same."""
    written: dict[str, Any] = {}
    for made in graphs:
        written |= {
            str(name): value.const_value
            for name, value in made.model.graph.initializers.items()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
    files = []
    for made in engine.build(source, replace(request, optimization="none")):
        weights = normalize_graph(made.model, made.weights, source=source, engine=engine.name)
        made = serve(made, weights, request.promise)  # noqa: PLW2901 - it is the same graph
        declare_interface(made.model, made.component)
        for name in list(weights):
            tensor, value = written.get(name), made.model.graph.initializers[name]
            if tensor is not None and list(tensor.shape) == list(value.shape or ()):
                value.const_value, value.type = tensor, ir.TensorType(tensor.dtype)
                del weights[name]
        files.append((_PLAIN + made.component.file, made.model, weights))
    stream_weights(files, folder=folder, threads=threads)
    for name, model, _ in files:
        ir.save(model, folder / name)


class _TimedGraph:
    """A graph in ONNX Runtime that is timed."""

    def __init__(self, path: Path, threads: int) -> None:
        declared = onnx.load(path, load_external_data=False).graph.input
        self._session = onnxruntime.InferenceSession(
            str(path), session_options(threads, mapped=True), providers=["CPUExecutionProvider"]
        )
        names = {value.name for value in self._session.get_inputs()}
        self.inputs = [value for value in declared if value.name in names]
        self.cached = any(name.startswith(CACHE) for name in names)

    def seconds(self, feed: dict[str, Any]) -> float:
        started = time.perf_counter()
        self._session.run(None, feed)
        return time.perf_counter() - started


def _measure(pairs: Sequence[Mapping[str, _TimedGraph]], *, tokens: int, end: int | None) -> Times:
    """Run both sides in turn; return medians in milliseconds.

    ``prefill`` reads a prompt; in an encoder-decoder, the encoder does. ``decode`` computes a token after a past, if there is a cache.
    """
    grows = pairs[-1]["after"].cached
    feeds = {}
    calls = {"prefill": (pairs[0], 0, tokens)} | ({"decode": (pairs[-1], tokens, 1)} if grows else {})
    for name, (pair, past, new) in calls.items():
        sizes = {BATCH: 1, SEQUENCE: new, PAST: past, TOTAL: past + new, SOURCE: tokens}
        sizes |= {SAMPLES: SOUND_SAMPLES, FRAMES: 5}
        feeds[name] = make_feed(pair["after"].inputs, sizes, past=past, end=end)
    times: dict[str, dict[str, list[float]]] = {side: {name: [] for name in calls} for side in ("before", "after")}
    for turn in range(1 + ROUNDS):
        for name, (pair, _, _) in calls.items():
            for side, runs in pair.items():
                seconds = runs.seconds(feeds[name])
                if turn:  # the first call allocates memory, and reads the weights
                    times[side][name].append(seconds)
    return {
        side: {name: round(1000 * median(each), 3) for name, each in named.items()} for side, named in times.items()
    }
