"""Run a decoder in layers: the graphs of ``onnx-layered``, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipway.model.graphs.fixed_graph import FixedGraph, TooLongError
from slipway.proof.numerics import Logits
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, Bounds, NotRunnable, Past, Step, Unusable
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel, Value

FOLDER = "onnx-layered"

_TEXT = ("attention_mask", "input_ids", "position_ids")
_HIDDEN, _NEXT = "hidden_states", "next_hidden_states"


class OnnxLayers(GraphModel):
    """Graphs that pass on hidden states, and the first graph's results for all; see :class:`slipway.proof.runtime.LanguageModel`."""

    def __init__(self, folder: Path, *, threads: int, stored: str) -> None:
        names = ["embedding", *sorted(path.stem for path in folder.glob("layer_*.onnx")), "head"]
        self._graphs = [Graph(folder / f"{name}.onnx", threads=threads, alone=False) for name in names]
        self._owners = {name: graph for graph in self._graphs for name in graph.inputs}
        self._past = [name for name in self._owners if name.startswith(PAST_PREFIX)]
        made = {"input_ids", "attention_mask", "position_ids", *self._past}
        for graph in self._graphs:
            # Each takes what the text, the cache or a graph before it gives.
            graph.require(inputs=set(), outputs=set(graph.outputs), known=made)
            made |= {_HIDDEN if name == _NEXT else name for name in graph.outputs}
        if not {"logits", *(PRESENT_PREFIX + name.removeprefix(PAST_PREFIX) for name in self._past)} <= made:
            raise Unusable(f"the graphs of {folder.name} do not give logits and a cache")
        shapes = {name: self._owners[name].inputs[name].shape for name in self._owners if name in {*_TEXT, *self._past}}
        fixed = isinstance(shapes["input_ids"][1], int)
        self._fixed = FixedGraph(self._compute, shapes, per_token=True) if fixed else None
        first, last = self._graphs[0], self._graphs[-1]
        bounds = Bounds() if fixed else first.bounds()
        super().__init__(partial(last.engine, "logits", stored=stored), bounds, has_cache=True)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        if self._fixed is not None:
            return self._forward_fixed(step, self._fixed)
        values: dict[str, Value] = {
            name: self._owners[name].value(name, getattr(step, name)) for name in _TEXT if name in self._owners
        }
        for name in self._past:
            owner = self._owners[name]
            if step.past is None:
                values |= owner.empty_past([name], batch=len(step.input_ids))
            else:
                values[name] = step.past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)]
        values = self._run_in_turn(values)
        presents = {name: value for name, value in values.items() if name.startswith(PRESENT_PREFIX)}
        return values["logits"].numpy().astype(np.float32, copy=False), presents

    def _forward_fixed(self, step: Step, fixed: FixedGraph) -> tuple[Logits, Past]:
        feed = {name: getattr(step, name) for name in _TEXT if name in self._owners}
        past = fixed.empty_past(batch=len(step.input_ids)) if step.past is None else step.past
        feed |= {PAST_PREFIX + name.removeprefix(PRESENT_PREFIX).removeprefix(PAST_PREFIX): past[name] for name in past}
        try:
            outputs = fixed.run(feed)
        except TooLongError as error:
            raise NotRunnable(f"the graphs have fixed shapes: {error}") from error
        presents = {name: value for name, value in outputs.items() if name.startswith(PRESENT_PREFIX)}
        return outputs["logits"].astype(np.float32, copy=False), presents

    def _compute(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Run the graphs on arrays of exactly their shapes."""
        values = self._run_in_turn({name: self._owners[name].value(name, array) for name, array in feed.items()})
        return {
            name: value.numpy() for name, value in values.items() if name == "logits" or name.startswith(PRESENT_PREFIX)
        }

    def _run_in_turn(self, given: Mapping[str, Value]) -> dict[str, Value]:
        values = dict(given)
        for graph in self._graphs:
            values |= graph.run({name: values[name] for name in graph.inputs})
            if _NEXT in values:
                values[_HIDDEN] = values.pop(_NEXT)
        return values
