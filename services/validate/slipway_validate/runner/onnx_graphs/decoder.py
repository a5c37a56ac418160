"""Run a decoder's ``model.onnx``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipway_validate.numerics import Logits
from slipway_validate.runner.model import PAST_PREFIX, PRESENT_PREFIX, Past, Step
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel

_TEXT = {"input_ids", "attention_mask", "position_ids"}


class OnnxDecoder(GraphModel):
    """A decoder graph with the usual names of inputs and outputs; see :class:`slipway_validate.runner.model.LanguageModel`."""

    def __init__(self, folder: Path, *, threads: int, stored: str) -> None:
        self._graph = graph = Graph(folder / "model.onnx", threads=threads)
        self._past = [name for name in graph.inputs if name.startswith(PAST_PREFIX)]
        presents = {PRESENT_PREFIX + name.removeprefix(PAST_PREFIX) for name in self._past}
        graph.require(inputs={"input_ids"}, outputs={"logits", *presents}, known={*_TEXT, *self._past})
        super().__init__(graph.engine("logits", stored=stored), graph.bounds(), has_cache=bool(self._past))

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        feed = {
            name: self._graph.value(name, getattr(step, name)) for name in sorted(_TEXT) if name in self._graph.inputs
        }
        if step.past is None:
            feed |= self._graph.empty_past(self._past, batch=len(step.input_ids))
        else:
            feed |= {name: step.past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past}
        found = self._graph.run(feed)
        logits = found.pop("logits").numpy()
        return logits.astype(np.float32, copy=False), found if self.has_cache else None
