"""Let a graph of float16 take and give float32, except for its cache: transformers.js has sound and results in float32."""

from __future__ import annotations

import onnx_ir as ir

_CACHE = ("past_key_values.", "present.")


def use_float32_interface(model: ir.Model) -> None:
    """Cast inputs and results of float16 within the graph. The cache stays as it is: it goes from call to call unread."""
    graph = model.graph
    for value in filter(_is_half, graph.inputs):
        uses = list(value.uses())
        cast = _cast(value, ir.DataType.FLOAT16, name=f"{value.name}.fp16")
        graph.insert_before(graph[0], cast)
        for use in uses:
            use.node.replace_input_with(use.idx, cast.outputs[0])
        value.type = ir.TensorType(ir.DataType.FLOAT)
    for place, value in enumerate(graph.outputs):
        if _is_half(value):
            cast = _cast(value, ir.DataType.FLOAT, name=str(value.name))
            value.name = f"{value.name}.fp16"
            graph.append(cast)
            graph.outputs[place] = cast.outputs[0]


def _is_half(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT16 and not str(value.name).startswith(_CACHE)


def _cast(value: ir.Value, dtype: ir.DataType, *, name: str) -> ir.Node:
    node = ir.node("Cast", [value], {"to": int(dtype)}, name=f"{name}/Cast")
    made = node.outputs[0]
    made.name, made.type, made.shape = name, ir.TensorType(dtype), value.shape
    return node
