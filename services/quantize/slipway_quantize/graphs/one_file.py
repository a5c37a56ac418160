"""Put the weights of written graphs into the graphs' own files."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import QuantizationError
from slipway.model.graphs.inline import take_weights_in
from slipway_quantize.graphs.folder import DATA_SUFFIX, graph_files, load_graph, save_graph


def take_data_in(folder: Path) -> None:
    """Move the weights of a folder's graphs from their data files into the graphs, and delete these files.

    Raises:
        QuantizationError: ``ONNX_TOO_LARGE`` if a graph would exceed what a protobuf file can have.
    """
    names = graph_files(folder)
    for name in names:  # a graph may share weights that lie in the file of another one
        model = load_graph(folder, name)
        take_weights_in(model, name, error=QuantizationError)
        save_graph(model, folder, name)
    for name in names:
        (folder / (name + DATA_SUFFIX)).unlink(missing_ok=True)
