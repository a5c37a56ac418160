"""Turn a bf16 graph into one that ONNX Runtime runs on CPU: it computes in float32 and rounds every value that is bfloat16."""

from __future__ import annotations

import onnx_ir as ir

_WIDE, _NARROW = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.BFLOAT16)


def has_type(model: ir.Model, *types: ir.DataType) -> bool:
    """Return whether the graph computes with weights or inputs of one of the types; casting a weight does not count."""
    weights = (value for value in model.graph.initializers.values() if value.dtype in types)
    computes = any(use.node.op_type != "Cast" for value in weights for use in value.uses())
    return computes or any(value.dtype in types for value in model.graph.inputs)


def widen(model: ir.Model) -> None:
    """Make a graph compute in float32, in place. Sums are not rounded on the way, as in the kernels of GPUs.

    Inputs and outputs become float32; weights stay as they are stored.
    """
    graph = model.graph
    for value in graph.inputs:
        if value.dtype == ir.DataType.BFLOAT16:
            value.type = _WIDE
    for node in list(graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.BFLOAT16:
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        for value in node.outputs:
            if value.dtype == ir.DataType.BFLOAT16:
                _round(graph, node, value)
    for value in list(graph.initializers.values()):
        if value.dtype == ir.DataType.BFLOAT16 and value.uses():
            wide = _cast(value, ir.DataType.FLOAT)
            value.replace_all_uses_with(wide.outputs[0])
            wide.replace_input_with(0, value)
            graph.insert_before(graph[0], wide)


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Make all readers of a value read it rounded to bfloat16; a result of the graph keeps its name."""
    name = value.name
    value.type = _WIDE
    narrow = _cast(value, ir.DataType.BFLOAT16)
    wide = _cast(narrow.outputs[0], ir.DataType.FLOAT)
    value.replace_all_uses_with(wide.outputs[0], replace_graph_outputs=True)
    narrow.replace_input_with(0, value)
    graph.insert_after(node, [narrow, wide])
    value.name, wide.outputs[0].name = f"{name}.exact", name


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    cast.outputs[0].name = f"{value.name}.{'wide' if dtype == ir.DataType.FLOAT else 'narrow'}"
    cast.outputs[0].type = _WIDE if dtype == ir.DataType.FLOAT else _NARROW
    cast.outputs[0].shape = value.shape
    return cast
