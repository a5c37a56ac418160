"""Take the weights of an ONNX graph from its data files into the graph itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipway.errors import ModelExportError
from slipway.sizes import format_size

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_INLINE_BYTES = (2 << 30) - (64 << 20)
"""protobuf's limit of 2 GiB, less room for the graph itself."""


def take_weights_in(model: ir.Model, name: str, *, error: type[ModelExportError]) -> None:
    """Load the weights of a graph into it, in memory.

    Args:
        model: The graph.
        name: Its file's name, for the error.
        error: The caller's kind of error.

    Raises:
        ModelExportError: ``ONNX_TOO_LARGE`` if the graph would exceed the 2 GB that a protobuf file can have.
    """
    import onnx_ir as ir

    tensors = (value.const_value for value in model.graph.initializers.values())
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if size > MOST_INLINE_BYTES:
        raise error(
            f"{name} has {format_size(size)} of weights, and a graph can hold {format_size(MOST_INLINE_BYTES)}",
            reason="ONNX_TOO_LARGE",
            remedy="set external_data to true",
            about={"file": name, "size_bytes": size},
        )
    ir.external_data.load_to_model(model)
