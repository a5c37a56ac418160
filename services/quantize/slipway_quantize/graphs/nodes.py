"""Replace nodes of a graph, and name the linear layers of its weights."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from slipway_quantize.graphs.folder import add_initializer
from slipway_quantize.levels import is_named


def is_kept(weight: str, keep: Collection[str]) -> bool:
    """Return whether a weight belongs to a linear layer of ``keep``."""
    return any(is_named(module, keep) for module in linear_layers_of(weight))


def linear_layers_of(weight: str) -> list[str]:
    """Return the linear layers of a weight by its name: ``layers.0.q_proj+k_proj.weight.T`` is of two."""
    path, _, last = weight.removesuffix(".T").removesuffix(".weight").rpartition(".")
    return [f"{path}.{name}" if path else name for name in last.split("+")]


def add_inline_constant(model: ir.Model, name: str, values: list[int]) -> ir.Value:
    """Add integers to the graph itself: runtimes read shapes before external data."""
    return add_initializer(model, ir.tensor(np.array(values, dtype=np.int64), name=name))


def replace_node(graph: ir.Graph, old: ir.Node, new: list[ir.Node]) -> None:
    """Replace ``old`` by ``new``; the output of the last new node takes over the name and all uses."""
    ir.convenience.replace_nodes_and_values(graph, old, [old], new, old.outputs, new[-1].outputs)


def remove_unused(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer that is no longer used, and its unused transposes."""
    for user in list(value.consumers()):
        if not user.outputs[0].uses():
            graph.remove(user, safe=True)
    if not value.uses():
        assert value.name is not None
        del graph.initializers[value.name]
