"""Load the graphs of a folder with ONNX Runtime, and run one that reads a whole text in one call.

It is an encoder, or a decoder with a classification head.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, PAIRS, SEQUENCE_CLASSIFIER, Family
from slipway.model.graphs.pictures import EMBEDDING
from slipway.model.sentences import SENTENCE_EMBEDDING
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import LanguageModel, Step, known_family
from slipway.proof.text_models import TextReader
from slipway_validate.runner.onnx_graphs.decoders import (
    LAYERS_FOLDER,
    OnnxDecoder,
    OnnxLayers,
    OnnxPair,
    SharedBufferDecoder,
)
from slipway_validate.runner.onnx_graphs.parts import OnnxParts
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel


def load(folder: Path, *, threads: int) -> LanguageModel:
    """Load an output.

    Raises:
        Unusable: ONNX Runtime cannot load a graph, or the graphs are not those of the model's family.
    """
    layers = folder / LAYERS_FOLDER
    if layers.is_dir():
        return OnnxLayers(layers, threads=threads, stored=stored_dtype(folder))
    try:
        config = ModelConfig.read(folder)
    except CheckpointValidationError:
        config = ModelConfig({})  # a graph alone is taken for a decoder
    family, stored = (known_family(config, folder) if config else DECODER), stored_dtype(folder)
    if family is DECODER and (folder / EMBEDDING).is_file():
        return OnnxParts(folder, threads=threads, stored=stored)
    if family is DECODER:
        graph = Graph(folder / "model.onnx", threads=threads)
        return (SharedBufferDecoder if graph.promise.shared_buffer else OnnxDecoder)(graph, stored=stored)
    if family in PAIRS:
        return OnnxPair(folder, threads=threads, stored=stored)
    return OnnxText(folder, family, config, threads=threads, stored=stored)


class OnnxText(TextReader, GraphModel):
    """A graph without a cache; see :class:`slipway.proof.runtime.LanguageModel`."""

    def __init__(self, folder: Path, family: Family, config: ModelConfig, *, threads: int, stored: str) -> None:
        tokens = family is not SEQUENCE_CLASSIFIER
        self._graph = graph = Graph(folder / "model.onnx", threads=threads, per_token=tokens, padding=config.padding)
        self.read_as(family, config, graph.outputs)
        outputs = {*family.outputs, *((SENTENCE_EMBEDDING,) if self.embeds else ())}
        graph.require(inputs={"input_ids"}, outputs=outputs, known={"attention_mask", "token_type_ids"})
        super().__init__(partial(graph.engine, family.outputs[0], stored=stored), graph.bounds(), has_cache=False)

    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """As :meth:`slipway.proof.text_models.TextReader.results`."""
        given = {
            "input_ids": step.input_ids,
            "attention_mask": step.attention_mask,
            "token_type_ids": np.zeros_like(step.input_ids),
        }
        outputs = self._graph.run({name: self._graph.value(name, given[name]) for name in self._graph.inputs})
        return [outputs[name].numpy().astype(np.float32, copy=False) for name in names]
