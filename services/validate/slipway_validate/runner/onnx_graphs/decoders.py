"""Run models that write text: a decoder of one graph or in layers, or the two graphs of an encoder–decoder.

A decoder's ``model.onnx`` may have one buffer for past and present keys and values. A decoder in layers is the graphs of ``onnx-layered``,
one after another. Of an encoder–decoder, ``encoder_model.onnx`` runs once, then ``decoder_model.onnx`` for each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipway.model.graphs.calls import FixedGraph, TooLongError
from slipway.proof.numerics import Ints, Logits
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, Bounds, NotRunnable, Past, Step, Unusable
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel, Value

_TEXT = {"input_ids", "attention_mask", "position_ids"}

_SPARE = 128
"""Tokens for which a buffer has room beyond those of a call, so that it seldom grows."""

LAYERS_FOLDER = "onnx-layered"

_LAYER_INPUTS = ("attention_mask", "input_ids", "position_ids")
_HIDDEN, _NEXT = "hidden_states", "next_hidden_states"

_MASK, _ENCODED = "encoder_attention_mask", "encoder_hidden_states"


class OnnxDecoder(GraphModel):
    """A decoder graph with the usual names of inputs and outputs; see :class:`slipway.proof.runtime.LanguageModel`."""

    def __init__(self, graph: Graph, *, stored: str) -> None:
        self._graph = graph
        self._past = [name for name in graph.inputs if name.startswith(PAST_PREFIX)]
        presents = {PRESENT_PREFIX + name.removeprefix(PAST_PREFIX) for name in self._past}
        graph.require(inputs={"input_ids"}, outputs={"logits", *presents}, known={*_TEXT, *self._past})
        super().__init__(partial(graph.engine, "logits", stored=stored), graph.bounds(), has_cache=bool(self._past))

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`.

        A graph that returns logits of the last token only computes the other tokens one at a time, each after those before it.
        """
        columns = step.input_ids.shape[1]
        if not self._graph.promise.last_logits or step.last_only or columns == 1:
            return self._call(step)
        before, past, parts = step.attention_mask.shape[1] - columns, step.past, []
        for column in range(columns - 1):
            here = slice(column if self.has_cache else 0, column + 1)
            mask = step.attention_mask[:, : before + column + 1]
            logits, past = self._call(Step(step.input_ids[:, here], mask, step.position_ids[:, here], past))
            parts.append(logits)
        logits, past = self._call(step)
        return self._join([*parts, logits], step.attention_mask[:, before:]), past

    @staticmethod
    def _join(parts: list[Logits], mask: np.ndarray) -> Logits:
        """Join the logits of all columns; the last call's are those of each row's last token. mask: (B, S)."""
        joined: Logits = np.concatenate(parts, axis=1)
        ends = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
        joined[np.arange(len(mask)), ends] = parts[-1][:, 0]
        return joined

    def _call(self, step: Step) -> tuple[Logits, Past]:
        """Call the graph once."""
        feed = self._inputs(step)
        if step.past is None:
            feed |= self._graph.empty_past(self._past, batch=len(step.input_ids))
        else:
            feed |= {name: step.past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past}
        outputs = self._graph.run(feed)
        logits = outputs.pop("logits").numpy()
        return logits.astype(np.float32, copy=False), outputs if self.has_cache else None

    def _inputs(self, step: Step) -> dict[str, Value]:
        return {
            name: self._graph.value(name, getattr(step, name)) for name in sorted(_TEXT) if name in self._graph.inputs
        }


class Buffers:
    """Keys and values of some rows, which the graph writes in place.

    Args:
        graph: The graph.
        names: Its inputs for them.
        batch: Number of rows.
    """

    def __init__(self, graph: Graph, names: list[str], *, batch: int) -> None:
        self._graph, self._room = graph, 0
        self._held = graph.empty_past(names, batch=batch)

    def run(self, feed: dict[str, Value], *, tokens: int) -> Logits:
        """Run the graph on rows that then have ``tokens`` tokens; return the logits."""
        if tokens > self._room:
            self._room = tokens + _SPARE
            self._held = {name: self._grow(name, value.numpy()) for name, value in self._held.items()}
        presents = {PRESENT_PREFIX + name.removeprefix(PAST_PREFIX): value for name, value in self._held.items()}
        logits: Logits = self._graph.run_in_place(feed | self._held, presents)["logits"].numpy()
        return logits

    def _grow(self, name: str, old: Logits) -> Value:
        rows, heads, tokens, size = old.shape
        new = np.zeros((rows, heads, self._room, size), old.dtype)
        new[:, :, :tokens] = old
        return self._graph.value(name, new)


@dataclass(frozen=True, slots=True)
class SharedPast:
    """The tokens so far. mask: (B, tokens), 1 for a token and 0 for padding; buffers: their keys and values."""

    mask: Ints
    buffers: Buffers


class SharedBufferDecoder(OnnxDecoder):
    """A decoder graph that counts the tokens of a row by its mask, and writes new keys and values into the buffer of the old ones.

    Whatever the side of the padding in a call, the graph gets it on the right.
    """

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`.

        Raises:
            NotRunnable: The call has several tokens after a past in a batch, or a row without tokens.
        """
        new = step.attention_mask[:, -step.input_ids.shape[1] :].astype(bool)
        counts = new.sum(axis=1)
        filled = np.arange(counts.max()) < counts[:, None]  # (B, most tokens of a row)
        before = np.zeros((len(new), 0), np.int64) if step.past is None else step.past.mask
        if len(new) > 1 and (counts.min() < 1 or (before.shape[1] and filled.shape[1] > 1)):
            raise NotRunnable("a graph with a shared buffer takes one token for each row of a batch after its past")
        ids, positions = (np.zeros(filled.shape, np.int64) for _ in range(2))
        ids[filled], positions[filled] = step.input_ids[new], step.position_ids[new]
        mask = np.concatenate([before, filled.astype(np.int64)], axis=1)
        logits, past = super().forward(replace(step, input_ids=ids, attention_mask=mask, position_ids=positions))
        if logits.shape[1] != filled.shape[1]:
            return logits, past
        spread = np.zeros((*new.shape, logits.shape[2]), np.float32)
        spread[new] = logits[filled]
        return spread, past

    def _call(self, step: Step) -> tuple[Logits, Past]:
        total = step.attention_mask.shape[1]
        buffers = (
            step.past.buffers if step.past is not None else Buffers(self._graph, self._past, batch=len(step.input_ids))
        )
        logits = buffers.run(self._inputs(step), tokens=total)
        return logits.astype(np.float32, copy=False), SharedPast(step.attention_mask, buffers)


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
        shapes = {
            name: self._owners[name].inputs[name].shape
            for name in self._owners
            if name in {*_LAYER_INPUTS, *self._past}
        }
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
            name: self._owners[name].value(name, getattr(step, name)) for name in _LAYER_INPUTS if name in self._owners
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
        feed = {name: getattr(step, name) for name in _LAYER_INPUTS if name in self._owners}
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


class OnnxPair(GraphModel):
    """An encoder and a decoder; see :class:`slipway.proof.runtime.LanguageModel`.

    The encoder also gives keys and values of the cross-attention, which every step of the decoder takes. A decoder without a cache
    takes what the encoder computed from the text instead, and reads its own text again at each step.
    """

    def __init__(self, folder: Path, *, threads: int, stored: str) -> None:
        self._encoder = encoder = Graph(folder / "encoder_model.onnx", threads=threads)
        self._decoder = decoder = Graph(folder / "decoder_model.onnx", threads=threads)
        cached = [name for name in decoder.inputs if name.startswith(PAST_PREFIX)]
        self._own = [name for name in cached if ".decoder." in name]
        self._cross = [name for name in cached if ".encoder." in name]
        self._source = next((name for name in encoder.inputs if name != "attention_mask"), "input_ids")
        encoder.require(inputs={self._source}, outputs=set(map(_present, self._cross)), known={"attention_mask"})
        presents = set(map(_present, self._own))
        needed = {"input_ids"} if cached else {"input_ids", _ENCODED}
        decoder.require(inputs=needed, outputs={"logits", *presents}, known={_MASK, *self._own, *self._cross})
        super().__init__(partial(decoder.engine, "logits", stored=stored), decoder.bounds(), has_cache=bool(cached))

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        assert step.source is not None
        mask = step.source.mask
        if step.past is None:
            past = self._encode(step) | self._decoder.empty_past(self._own, batch=len(step.input_ids))
        else:
            past = step.past
        feed = {"input_ids": self._decoder.value("input_ids", step.input_ids), **past}
        if _MASK in self._decoder.inputs and mask is not None:
            feed[_MASK] = self._decoder.value(_MASK, mask)
        outputs = self._decoder.run(feed)
        logits = outputs["logits"].numpy()
        if not self.has_cache:
            return logits.astype(np.float32, copy=False), None
        return logits.astype(np.float32, copy=False), past | {name: outputs[_present(name)] for name in self._own}

    def _encode(self, step: Step) -> dict[str, Value]:
        assert step.source is not None
        feed = {self._source: self._encoder.value(self._source, step.source.values)}
        if "attention_mask" in self._encoder.inputs and step.source.mask is not None:
            feed["attention_mask"] = self._encoder.value("attention_mask", step.source.mask)
        outputs = self._encoder.run(feed)
        if not self.has_cache:
            return {_ENCODED: outputs["last_hidden_state"]}
        return {name: outputs[_present(name)] for name in self._cross}


def _present(name: str) -> str:
    """Return the output that gives the next value of a cache input."""
    return PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)
