"""Load the graphs of a folder with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import CheckpointValidationError
from slipway.model.base_format import read_config
from slipway.model.families import DECODER, ENCODER_DECODER, SPEECH, described, family_of
from slipway_validate.folders import stored_dtype
from slipway_validate.runner.model import LanguageModel, Unusable
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
        config = read_config(folder)
    except CheckpointValidationError:
        config = {}  # a graph alone is taken for a decoder
    family, stored = (family_of(config) if config else DECODER), stored_dtype(folder)
    if family is None:
        raise Unusable(f"{folder.name!r} is {described(config)}, whose family is unknown")
    if family is DECODER:
        graph = Graph(folder / "model.onnx", threads=threads)
        return (SharedBufferDecoder if graph.promise.shared_buffer else OnnxDecoder)(graph, stored=stored)
    if family in (ENCODER_DECODER, SPEECH):
        return OnnxPair(folder, threads=threads, stored=stored)
    several = config.get("problem_type") == "multi_label_classification"
    padding = config.get("pad_token_id")
    padding = padding if isinstance(padding, int) and padding >= 0 else 0
    return OnnxText(folder, family, several_labels=several, threads=threads, stored=stored, padding=padding)
