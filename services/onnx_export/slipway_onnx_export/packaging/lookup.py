"""Express the lookup in a quantized embedding by standard operators: onnxruntime-web has ``GatherBlockQuantized`` on GPUs alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from slipway_onnx_export.packaging.kinds import NotPackagedError


def expand_quantized_lookups(model: ir.Model) -> None:
    """Replace each ``GatherBlockQuantized`` of a graph by a Gather of integers and scales, and their product. Values stay the same.

    Raises:
        NotPackagedError: A node has another form than the one that Slipway writes.
    """
    for node in [node for node in model.graph if node.op_type == "GatherBlockQuantized"]:
        _expand(model.graph, node)


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    """Axes: ids (…), data (tokens, groups, bytes), scales (tokens, groups, 1), result (…, groups, weights of a group)."""
    data, ids, scales = node.inputs
    bits, axis = node.attributes.get_int("bits", 4), node.attributes.get_int("gather_axis", 0)
    assert data is not None
    assert ids is not None
    assert scales is not None
    known = ids.shape is not None and data.dtype == ir.DataType.UINT8 and scales.dtype in (None, ir.DataType.FLOAT)
    if not known or bits not in (4, 8) or axis:
        raise NotPackagedError("its embedding is quantized in a form that cannot be expressed by standard operators")
    assert ids.shape is not None
    rank = len(ids.shape)
    made: list[ir.Node] = []

    def add(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made.append(ir.node(kind, list(inputs), attributes, name=f"{node.name}/{len(made)}"))
        made[-1].outputs[0].name = f"{node.name}/value_{len(made)}"
        return made[-1].outputs[0]

    def constant(name: str, value: list[int] | float) -> ir.Value:
        array = np.array(value, np.int64 if isinstance(value, list) else np.float32)
        tensor = ir.tensor(array, name=f"{node.name}/{name}")
        found = ir.Value(
            name=tensor.name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        graph.register_initializer(found)
        return found

    codes = add("Cast", add("Gather", data, ids, axis=0), to=int(ir.DataType.FLOAT))
    if bits == 4:  # two in a byte, the lower one first; in float32, because not every runtime has shifts of bytes
        sixteen, last = constant("sixteen", 16.0), constant("last", [-1])
        high = add("Floor", add("Div", codes, sixteen))
        low = add("Sub", codes, add("Mul", high, sixteen))
        pairs = add("Concat", add("Unsqueeze", low, last), add("Unsqueeze", high, last), axis=-1)
        codes = add("Reshape", pairs, constant("shape", [0] * (rank + 1) + [-1]))
    centred = add("Sub", codes, constant("zero_point", float(1 << (bits - 1))))
    result = add("Mul", centred, add("Gather", scales, ids, axis=0))
    old = node.outputs[0]
    result.shape, result.type = old.shape, old.type
    graph.insert_before(node, made)
    ir.convenience.replace_all_uses_with(old, result)
    graph.remove(node, safe=True)
