"""Run a ``model.onnx`` that reads a whole text in one call: an encoder, or a decoder with a classification head."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from slipway.model.families import SEQUENCE_CLASSIFIER, Comparison, Family
from slipway.model.sentences.pooling import SENTENCE_EMBEDDING
from slipway_validate.numerics import Logits
from slipway_validate.runner.model import Past, Step, class_results
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel


class OnnxText(GraphModel):
    """A graph without a cache; see :class:`slipway_validate.runner.model.LanguageModel`."""

    def __init__(
        self, folder: Path, family: Family, *, several_labels: bool, threads: int, stored: str, padding: int = 0
    ) -> None:
        tokens = family is not SEQUENCE_CLASSIFIER
        self._graph = graph = Graph(folder / "model.onnx", threads=threads, per_token=tokens, padding=padding)
        self._family, self._several_labels = family, several_labels
        self.embeds = SENTENCE_EMBEDDING in graph.outputs
        outputs = {*family.outputs, *((SENTENCE_EMBEDDING,) if self.embeds else ())}
        graph.require(inputs={"input_ids"}, outputs=outputs, known={"attention_mask", "token_type_ids"})
        super().__init__(partial(graph.engine, family.outputs[0], stored=stored), graph.bounds(), has_cache=False)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        values = self._run(step, self._family.outputs)
        if self._family.comparison is Comparison.SPANS:
            return np.stack(values, axis=1), None
        if self._family.comparison is Comparison.CLASSES:
            return class_results(values[0], several_labels=self._several_labels), None
        return values[0], None

    def embed(self, step: Step) -> Logits:
        """As :meth:`slipway_validate.runner.model.LanguageModel.embed`."""
        return self._run(step, (SENTENCE_EMBEDDING,))[0][:, None]

    def _run(self, step: Step, outputs: tuple[str, ...]) -> list[Logits]:
        given = {
            "input_ids": step.input_ids,
            "attention_mask": step.attention_mask,
            "token_type_ids": np.zeros_like(step.input_ids),
        }
        found = self._graph.run({name: self._graph.value(name, given[name]) for name in self._graph.inputs})
        return [found[name].numpy().astype(np.float32, copy=False) for name in outputs]
