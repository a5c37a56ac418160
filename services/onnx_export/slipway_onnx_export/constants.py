"""Constants of graphs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def add_constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add an initializer with this name and value to a graph; return it."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value
