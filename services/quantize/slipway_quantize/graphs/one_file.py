"""Put the weights of written graphs into the graphs' own files."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from slipway.errors import QuantizationError
from slipway.sizes import format_size
from slipway_quantize.graphs.folder import DATA_SUFFIX, graph_files, load_graph, save_graph

MOST_INLINE_BYTES = (2 << 30) - (64 << 20)
"""protobuf's limit of 2 GiB, less room for the graph itself."""


def take_data_in(folder: Path) -> None:
    """Move the weights of a folder's graphs from their data files into the graphs, and delete these files.

    Raises:
        QuantizationError: ``ONNX_TOO_LARGE`` if a graph would exceed what a protobuf file can have.
    """
    names = graph_files(folder)
    for name in names:  # a graph may share weights that lie in the file of another one
        model = load_graph(folder, name)
        tensors = (value.const_value for value in model.graph.initializers.values())
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if size > MOST_INLINE_BYTES:
            raise QuantizationError(
                f"{name} has {format_size(size)} of weights, and a graph can hold {format_size(MOST_INLINE_BYTES)}",
                reason="ONNX_TOO_LARGE",
                remedy="set external_data to true",
                about={"file": name, "size_bytes": size},
            )
        ir.external_data.load_to_model(model)
        save_graph(model, folder, name)
    for name in names:
        (folder / (name + DATA_SUFFIX)).unlink(missing_ok=True)
