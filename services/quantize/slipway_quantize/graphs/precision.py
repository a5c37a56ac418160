"""Decide which values of an ONNX graph may be float16, and make a bfloat16 graph compute in float32.

Weights, matrix products, attention and the residual stream become half precision: they determine size and speed.
Values beyond half precision stay float32: squares and means inside norms (overflow above 256), positions and their
angles (not exact above 2048), softmax and other exponentials.

To run on CPU by ONNX Runtime, a bfloat16 graph computes in float32 and rounds every value that is bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from slipway.errors import QuantizationError

# Always computed in float32.
_FULL = frozenset(
    {
        "Pow", "Sqrt", "Reciprocal", "Exp", "Log", "Cos", "Sin", "Range", "CumSum", "Softmax", "LogSoftmax",
        "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceMax", "ReduceMin", "ReduceProd", "Softplus",
        "LogSumExp", "ReduceLogSumExp",
    }
)  # fmt: skip
# Always computed in float16: their kernels accumulate in float32 where it matters.
_HALF = frozenset(
    {
        "MatMul", "Gemm", "Conv", "Attention", "RotaryEmbedding", "RMSNormalization", "LayerNormalization",
        "GroupQueryAttention", "MultiHeadAttention", "SkipSimplifiedLayerNormalization",
        "SimplifiedLayerNormalization", "SkipLayerNormalization",
    }
)  # fmt: skip

_WIDE, _NARROW = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.BFLOAT16)


@dataclass(slots=True)
class HalfPlan:
    """The precision of every float value that a node computes.

    Attributes:
        half: Values (by identity) computed in float16; every other float32 value stays float32.
        constants: Initializers and outputs of Constant nodes (by identity); each node reads them in its own precision.
        wide: Names of values that float16 cannot hold; nodes that make or read them compute in float32.
    """

    half: set[int]
    constants: set[int]
    wide: Collection[str] = ()

    def wants_half(self, node: ir.Node) -> bool:
        """Return whether ``node`` computes in float16."""
        if self.is_wide(node):
            return False
        if node.op_type in _HALF:
            return True
        if node.op_type in _FULL or node.op_type == "Cast":  # an explicit cast to float32 stays one
            return False
        values = [id(value) for _, value in float_inputs(node)]
        # Without float inputs, an attribute has the values and their type, as in ConstantOfShape.
        return bool(values) and all(value in self.half for value in values if value not in self.constants)

    def is_wide(self, node: ir.Node) -> bool:
        """Return whether ``node`` makes or reads a value that float16 cannot hold."""
        return any(value is not None and value.name in self.wide for value in (*node.inputs, *node.outputs))


def plan_half(graph: ir.Graph, *, wide: Collection[str] = ()) -> HalfPlan:
    """Choose the precision of every value of ``graph``, whose nodes are in topological order.

    Args:
        graph: The graph.
        wide: Names of values that float16 cannot hold.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED`` for graphs with branches or loops.
    """
    plan = HalfPlan(
        half={id(value) for value in graph.inputs if is_float(value)},
        constants={id(value) for value in graph.initializers.values()},
        wide=wide,
    )
    for node in graph:
        types = {attribute.type for attribute in node.attributes.values()}
        if types & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
            raise QuantizationError(
                f"node {node.name!r} ({node.op_type}) contains a subgraph; fp16 does not support branches and loops",
                reason="QUANTIZATION_UNSUPPORTED",
                remedy="use level int8, or export with another engine",
                about={"node": node.name, "operator": node.op_type},
            )
        if node.op_type == "Constant" and node.domain == "":
            plan.constants.add(id(node.outputs[0]))
        elif plan.wants_half(node):
            plan.half.update(id(value) for value in _main_outputs(node))
    return plan


def float_inputs(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """Yield index and value of each float32 input of the node."""
    for index, value in enumerate(node.inputs):
        if value is not None and is_float(value):
            yield index, value


def is_float(value: ir.Value) -> bool:
    """Return whether ``value`` is float32, by its declared type or its constant."""
    if value.type is not None:
        return value.type.dtype == ir.DataType.FLOAT
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT


def _main_outputs(node: ir.Node) -> list[ir.Value]:
    """Return the outputs that have the node's precision; a norm's mean and deviation are always float32."""
    if node.op_type.endswith(("LayerNormalization", "RMSNormalization")):
        return [value for index, value in enumerate(node.outputs) if index not in (1, 2)]
    return list(node.outputs)


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
