"""Load the graphs of a folder with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, SPEECH
from slipway_validate.folders import stored_dtype
from slipway_validate.runner.model import LanguageModel, known_family
from slipway_validate.runner.onnx_graphs.decoder import OnnxDecoder
from slipway_validate.runner.onnx_graphs.layers import FOLDER, OnnxLayers
from slipway_validate.runner.onnx_graphs.pair import OnnxPair
from slipway_validate.runner.onnx_graphs.session import Graph
from slipway_validate.runner.onnx_graphs.shared_buffer import SharedBufferDecoder
from slipway_validate.runner.onnx_graphs.text import OnnxText


def load(folder: Path, *, threads: int) -> LanguageModel:
    """Load an output.

    Raises:
        Unusable: ONNX Runtime cannot load a graph, or the graphs are not those of the model's family.
    """
    layers = folder / FOLDER
    if layers.is_dir():
        return OnnxLayers(layers, threads=threads, stored=stored_dtype(folder))
    try:
        config = ModelConfig.read(folder)
    except CheckpointValidationError:
        config = ModelConfig({})  # a graph alone is taken for a decoder
    family, stored = (known_family(config, folder) if config else DECODER), stored_dtype(folder)
    if family is DECODER:
        graph = Graph(folder / "model.onnx", threads=threads)
        return (SharedBufferDecoder if graph.promise.shared_buffer else OnnxDecoder)(graph, stored=stored)
    if family in (ENCODER_DECODER, SPEECH):
        return OnnxPair(folder, threads=threads, stored=stored)
    return OnnxText(folder, family, config, threads=threads, stored=stored)
