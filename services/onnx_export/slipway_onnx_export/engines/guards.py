"""Remove the guard of traced attention against fully masked rows, which TensorRT's fusion of attention does not know.

torch masks scores with minus infinity, or the lowest float32. Where no position of a row is visible, the softmax may be NaN, and a
guard turns it into zeros: ``Where(IsNaN(p), 0, p)``. In float16 the guard stands between the softmax, computed in float32, and the
product with the values, and TensorRT-RTX 1.7 fails (``mha_fusion.cpp: CHECK(is_softmax(…))``). A mask within float16's range needs none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from slipway_onnx_export.engines.lowering import MASKED

_PASS = ("Identity", "Cast", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Slice", "Concat", "Tile")
"""Operators that copy the values of a mask."""


def remove_guards(model: ir.Model) -> int:
    """Mask scores with a finite value, in place, wherever a guard follows the softmax; return the number of removed guards.

    Rows without any visible position, which are padding, are then means over all positions and not zeros. A guard stays if its mask
    is not a choice between 0 and a value that hides.
    """
    graph = model.graph
    removed = 0
    for guard in list(graph):
        softmax = _guarded(guard)
        masks = _masks(softmax) if softmax is not None else []
        if softmax is None or not masks:
            continue
        for mask, index in masks:
            hiding = mask.inputs[index]
            mask.replace_input_with(index, _finite(graph))
            if hiding is not None and hiding.is_initializer() and not hiding.uses():
                del graph.initializers[str(hiding.name)]
        unknown = guard.inputs[0]
        guard.outputs[0].replace_all_uses_with(softmax.outputs[0])
        graph.remove(guard, safe=True)
        producer = unknown.producer() if unknown is not None else None
        if producer is not None and not producer.outputs[0].uses():
            graph.remove(producer, safe=True)
        removed += 1
    return removed


def _guarded(node: ir.Node) -> ir.Node | None:
    """Return the softmax whose NaNs this node replaces by zeros; None if it does something else."""
    if node.op_type != "Where" or node.domain or node.outputs[0].is_graph_output():
        return None
    unknown, zero, values = node.inputs
    test = unknown.producer() if unknown is not None else None
    if values is None or test is None or test.op_type != "IsNaN" or test.inputs[0] is not values or _number(zero) != 0:
        return None
    softmax = values.producer()
    return softmax if softmax is not None and softmax.op_type == "Softmax" else None


def _masks(softmax: ir.Node) -> list[tuple[ir.Node, int]]:
    """Return the nodes that choose between 0 and a value that hides, each with the index of the latter; empty if any is unknown."""
    scores = softmax.inputs[0]
    added = scores.producer() if scores is not None else None
    if added is None or added.op_type != "Add":
        return []
    for side in added.inputs:
        if side is not None and (found := _choices(side)):
            return found
    return []


def _choices(value: ir.Value) -> list[tuple[ir.Node, int]]:
    node = value.producer()
    if node is None:
        return []
    if node.op_type == "Where":
        for index, other in ((2, 1), (1, 2)):
            hiding = _number(node.inputs[index])
            if _number(node.inputs[other]) == 0 and hiding is not None and hiding <= MASKED:
                return [(node, index)]
        return []
    if node.op_type not in _PASS:
        return []
    copied = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    found = [_choices(each) if each is not None else [] for each in copied]
    return [choice for each in found for choice in each] if all(found) else []


def _number(value: ir.Value | None) -> float | None:
    """Return the only number of a constant; None for any other value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


def _finite(graph: ir.Graph) -> ir.Value:
    """Return the constant that is added to the scores of masked positions; all masks share it."""
    name = "attention.masked"
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(MASKED, np.float32), name=name)
        value = ir.Value(name=name, const_value=tensor, shape=ir.Shape([]), type=ir.TensorType(tensor.dtype))
        graph.register_initializer(value)
    return graph.initializers[name]
