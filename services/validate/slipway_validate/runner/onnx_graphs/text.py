"""Run a ``model.onnx`` that reads a whole text in one call: an encoder, or a decoder with a classification head."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from slipway.model.configuration import ModelConfig
from slipway.model.families import SEQUENCE_CLASSIFIER, Family
from slipway.model.sentences.pooling import SENTENCE_EMBEDDING
from slipway_validate.numerics import Logits
from slipway_validate.runner.model import Step
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel
from slipway_validate.runner.text_models import TextReader


class OnnxText(TextReader, GraphModel):
    """A graph without a cache; see :class:`slipway_validate.runner.model.LanguageModel`."""

    def __init__(self, folder: Path, family: Family, config: ModelConfig, *, threads: int, stored: str) -> None:
        tokens = family is not SEQUENCE_CLASSIFIER
        self._graph = graph = Graph(folder / "model.onnx", threads=threads, per_token=tokens, padding=config.padding)
        self.read_as(family, config, graph.outputs)
        outputs = {*family.outputs, *((SENTENCE_EMBEDDING,) if self.embeds else ())}
        graph.require(inputs={"input_ids"}, outputs=outputs, known={"attention_mask", "token_type_ids"})
        super().__init__(partial(graph.engine, family.outputs[0], stored=stored), graph.bounds(), has_cache=False)

    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """As :meth:`slipway_validate.runner.text_models.TextReader.results`."""
        given = {
            "input_ids": step.input_ids,
            "attention_mask": step.attention_mask,
            "token_type_ids": np.zeros_like(step.input_ids),
        }
        found = self._graph.run({name: self._graph.value(name, given[name]) for name in self._graph.inputs})
        return [found[name].numpy().astype(np.float32, copy=False) for name in names]
