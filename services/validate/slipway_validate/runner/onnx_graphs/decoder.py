"""Run a decoder's ``model.onnx``, also one whose past and present keys and values are one buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from slipway.proof.numerics import Ints, Logits
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, NotRunnable, Past, Step
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel, Value

_TEXT = {"input_ids", "attention_mask", "position_ids"}

_SPARE = 128
"""Tokens for which a buffer has room beyond those of a call, so that it seldom grows."""


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
