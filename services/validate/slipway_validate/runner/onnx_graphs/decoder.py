"""Run a decoder's ``model.onnx``."""

from __future__ import annotations

from functools import partial

import numpy as np

from slipway_validate.numerics import Logits
from slipway_validate.runner.model import PAST_PREFIX, PRESENT_PREFIX, Past, Step
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel, Value

_TEXT = {"input_ids", "attention_mask", "position_ids"}


class OnnxDecoder(GraphModel):
    """A decoder graph with the usual names of inputs and outputs; see :class:`slipway_validate.runner.model.LanguageModel`."""

    def __init__(self, graph: Graph, *, stored: str) -> None:
        self._graph = graph
        self._past = [name for name in graph.inputs if name.startswith(PAST_PREFIX)]
        presents = {PRESENT_PREFIX + name.removeprefix(PAST_PREFIX) for name in self._past}
        graph.require(inputs={"input_ids"}, outputs={"logits", *presents}, known={*_TEXT, *self._past})
        super().__init__(partial(graph.engine, "logits", stored=stored), graph.bounds(), has_cache=bool(self._past))

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`.

        A graph that returns logits of the last token only computes the other tokens one at a time, each after those before it.
        """
        columns = step.input_ids.shape[1]
        if not self._graph.promise.last_logits or step.last_only or columns == 1:
            return self._call(step)
        before, past, found = step.attention_mask.shape[1] - columns, step.past, []
        for column in range(columns - 1):
            here = slice(column if self.has_cache else 0, column + 1)
            mask = step.attention_mask[:, : before + column + 1]
            logits, past = self._call(Step(step.input_ids[:, here], mask, step.position_ids[:, here], past))
            found.append(logits)
        logits, past = self._call(step)
        return self._joined([*found, logits], step.attention_mask[:, before:]), past

    @staticmethod
    def _joined(found: list[Logits], mask: np.ndarray) -> Logits:
        """Join the logits of all columns; the last call's are those of each row's last token. mask: (B, S)."""
        joined: Logits = np.concatenate(found, axis=1)
        ends = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
        joined[np.arange(len(mask)), ends] = found[-1][:, 0]
        return joined

    def _call(self, step: Step) -> tuple[Logits, Past]:
        """Call the graph once."""
        feed = self._inputs(step)
        if step.past is None:
            feed |= self._graph.empty_past(self._past, batch=len(step.input_ids))
        else:
            feed |= {name: step.past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past}
        found = self._graph.run(feed)
        logits = found.pop("logits").numpy()
        return logits.astype(np.float32, copy=False), found if self.has_cache else None

    def _inputs(self, step: Step) -> dict[str, Value]:
        return {
            name: self._graph.value(name, getattr(step, name)) for name in sorted(_TEXT) if name in self._graph.inputs
        }
