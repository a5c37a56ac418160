"""Add a low-rank branch beside every product of a graph with a weight.

The branch of ``x @ W`` is ``x @ A @ B`` with two optional inputs, whose defaults have rank 0: without an adapter it adds zero. So the
graph depends on the base alone, and all its fine-tunes share it.

Axes: d_in and d_out = features of the layer, r = rank, which the adapter chooses for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

_WEIGHT = ".weight.T"
"""End of the name of a constant that onnx_export stores (d_in, d_out); the beginning is the module's name."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The inputs of one branch.

    Attributes:
        module: Name of the module.
        shape: Shape of its constant, (d_in, d_out).
    """

    module: str
    shape: tuple[int, int]

    @property
    def a(self) -> str:
        """Return the name of the input A, (d_in, r)."""
        return f"{self.module}.lora_A{_WEIGHT}"

    @property
    def b(self) -> str:
        """Return the name of the input B, (r, d_out)."""
        return f"{self.module}.lora_B{_WEIGHT}"


def add_branches(graph: ir.Graph) -> dict[str, Branch]:
    """Add a branch to every product of a float32 graph with a weight that no other product shares; return them by module."""
    found: dict[str, Branch] = {}
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" and len(node.inputs) == 2 else None
        if weight is None or not _is_weight(graph, weight):
            continue
        assert weight.name is not None
        assert weight.const_value is not None
        d_in, d_out = (int(size) for size in weight.const_value.shape.numpy())
        branch = Branch(weight.name.removesuffix(_WEIGHT), (d_in, d_out))
        _add(graph, node, branch)
        found[branch.module] = branch
    return found


def _is_weight(graph: ir.Graph, value: ir.Value) -> bool:
    tensor = value.const_value
    named = value.name is not None and value.name.endswith(_WEIGHT) and value.name in graph.initializers
    single = tensor is not None and len(tensor.shape) == 2 and len(value.uses()) == 1
    return named and single and tensor is not None and tensor.dtype == ir.DataType.FLOAT


def _add(graph: ir.Graph, node: ir.Node, branch: Branch) -> None:
    d_in, d_out = branch.shape
    rank = f"{branch.module}.rank"
    a = _optional(graph, branch.a, (d_in, rank), (d_in, 0))
    b = _optional(graph, branch.b, (rank, d_out), (0, d_out))
    [product] = node.outputs
    users = list(product.uses())
    low = ir.node("MatMul", [node.inputs[0], a], name=f"{branch.module}.lora_A")
    update = ir.node("MatMul", [low.outputs[0], b], name=f"{branch.module}.lora_B")
    added = ir.node("Add", [product, update.outputs[0]], name=f"{branch.module}.lora")
    low.outputs[0].name, update.outputs[0].name = f"{branch.module}.lora_A.output", f"{branch.module}.lora_B.output"
    [whole] = added.outputs
    whole.shape, whole.type, whole.name = product.shape, product.type, product.name
    product.name = f"{branch.module}.base.output"
    for user, place in users:
        user.replace_input_with(place, whole)
    for place, output in enumerate(graph.outputs):
        if output is product:
            graph.outputs[place] = whole
    graph.insert_after(node, [low, update, added])


def _optional(graph: ir.Graph, name: str, declared: tuple[int | str, int | str], default: tuple[int, int]) -> ir.Value:
    """Add an input with a default."""
    value = ir.Value(
        name=name,
        shape=ir.Shape(declared),
        type=ir.TensorType(ir.DataType.FLOAT),
        const_value=ir.tensor(np.zeros(default, np.float32), name=name),
    )
    graph.inputs.append(value)
    graph.register_initializer(value)
    return value
