"""Rewrite operators of newer opsets with older ones, for graphs that are built in the newest.

Covers only the operators that text decoders use. After writing, the ONNX checker finds any other operator that the older
opset lacks, and the parity check finds errors in the rewriting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from slipway.errors import ONNXExportError
from slipway_onnx_export.ir_graphs import add_constant

# Added to the scores of masked positions. Low enough to vanish in any softmax, and within float16's range, so that a fully
# masked row (left padding) stays finite in every precision.
MASKED = -30000.0


class Rewriter:
    """Collects the nodes that replace one node of a graph; all replacements share their constants."""

    def __init__(self, graph: ir.Graph, opset: int) -> None:
        self.graph = graph
        self.opset = opset
        self.steps: list[ir.Node] = []
        self.masks: dict[tuple[int, int, int], ir.Value] = {}
        self._constants: dict[tuple[str, tuple[float, ...], bool], ir.Value] = {}

    def op(self, kind: str, *inputs: ir.Value, **attributes: int | float | Sequence[int]) -> ir.Value:
        """Add a node of the standard domain; return its output."""
        node = ir.node(kind, list(inputs), attributes)
        self.steps.append(node)
        return node.outputs[0]

    def ints(self, *values: int) -> ir.Value:
        """Return a one-dimensional int64 constant."""
        return self._constant(np.array(values, dtype=np.int64))

    def scalar(self, value: float | int) -> ir.Value:
        """Return a constant without dimensions: int64 for an int, float32 for a float."""
        return self._constant(np.array(value, dtype=np.int64 if isinstance(value, int) else np.float32))

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """Return the size of one axis, as int64 of shape (1,)."""
        return self.op("Slice", self.op("Shape", value), self.ints(axis), self.ints(axis + 1))

    def mean(self, value: ir.Value) -> ir.Value:
        """Return the mean over the last axis, which is kept. The axes became an input in opset 18."""
        if self.opset < 18:
            return self.op("ReduceMean", value, axes=[-1], keepdims=1)
        return self.op("ReduceMean", value, self.ints(-1), keepdims=1)

    def _constant(self, array: np.ndarray) -> ir.Value:
        key = (str(array.dtype), tuple(array.reshape(-1).tolist()), array.ndim == 0)
        if key not in self._constants:
            name = f"constant.{array.dtype}.{len(self._constants)}"
            self._constants[key] = add_constant(self.graph, name, array)
        return self._constants[key]


def lower(model: ir.Model, opset: int) -> None:
    """Rewrite the operators that the opset lacks, in place, and set the graph's opset.

    Raises:
        ONNXExportError: ``EXPORT_ENGINE_UNSUPPORTED`` for a form of an operator that cannot be rewritten here.
    """
    graph = model.graph
    rewriter = Rewriter(graph, opset)
    for node in list(graph):
        rule = RULES.get(node.op_type)
        if node.domain or rule is None or opset >= rule[0]:
            continue
        outputs = rule[1](rewriter, node)
        if outputs:  # a rule that returns none changed the node itself
            _replace(graph, node, rewriter.steps, outputs)
        rewriter.steps = []
    graph.opset_imports[""] = opset


def _replace(graph: ir.Graph, node: ir.Node, steps: list[ir.Node], outputs: Sequence[ir.Value]) -> None:
    stem = node.outputs[0].name
    for index, step in enumerate(steps):
        step.name = f"{stem}.{step.op_type}.{index}"
        step.outputs[0].name = step.name
    graph.insert_before(node, steps)
    for old, new in zip(node.outputs, outputs, strict=False):
        name = old.name
        new.shape, new.type = old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}.replaced", name
    graph.remove(node, safe=True)


def _rms_normalization(to: Rewriter, node: ir.Node) -> list[ir.Value]:
    x, weight = _inputs(node, 2)
    _require(node, node.attributes.get_int("axis", -1) == -1)
    square = to.op("Pow", x, to.scalar(2.0))
    root = to.op("Sqrt", to.op("Add", to.mean(square), to.scalar(_float(node, "epsilon", 1e-5))))
    return [to.op("Mul", to.op("Div", x, root), weight)]


def _layer_normalization(to: Rewriter, node: ir.Node) -> list[ir.Value]:
    x, weight = _inputs(node, 2)
    _require(node, node.attributes.get_int("axis", -1) == -1 and not any(out.uses() for out in node.outputs[1:]))
    centred = to.op("Sub", x, to.mean(x))
    variance = to.mean(to.op("Pow", centred, to.scalar(2.0)))
    root = to.op("Sqrt", to.op("Add", variance, to.scalar(_float(node, "epsilon", 1e-5))))
    scaled = to.op("Mul", to.op("Div", centred, root), weight)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return [scaled if bias is None else to.op("Add", scaled, bias)]


def _gelu(to: Rewriter, node: ir.Node) -> list[ir.Value]:
    (x,) = _inputs(node, 1)
    half = to.op("Mul", x, to.scalar(0.5))
    if node.attributes.get_string("approximate", "none") == "tanh":
        cube = to.op("Mul", to.op("Pow", x, to.scalar(3.0)), to.scalar(0.044715))
        inner = to.op("Tanh", to.op("Mul", to.op("Add", x, cube), to.scalar(math.sqrt(2 / math.pi))))
    else:
        inner = to.op("Erf", to.op("Mul", x, to.scalar(math.sqrt(0.5))))
    return [to.op("Mul", half, to.op("Add", inner, to.scalar(1.0)))]


def _shape(to: Rewriter, node: ir.Node) -> list[ir.Value]:
    (x,) = _inputs(node, 1)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", np.iinfo(np.int64).max)
    return [to.op("Slice", to.op("Shape", x), to.ints(int(start or 0)), to.ints(int(end or 0)))]


def _split(_to: Rewriter, node: ir.Node) -> list[ir.Value]:
    """Remove ``num_outputs``, which older opsets lack; the number of outputs says the same."""
    node.attributes.pop("num_outputs", None)
    return []


def _rotary_embedding(to: Rewriter, node: ir.Node) -> list[ir.Value]:
    """Rotate pairs made of the first and the second half of each head.

    x: (batch, sequence, heads · size), cos and sin: (batch, sequence, rotated / 2).
    """
    x, cos, sin = _inputs(node, 3)
    heads = int(node.attributes.get_int("num_heads", 0) or 0)
    width, half = _last_size(x), _last_size(cos)
    _require(node, heads > 0 and not node.attributes.get_int("interleaved", 0) and width > 0 and half > 0)
    size = width // heads
    parts = [half, half] + ([size - 2 * half] if size > 2 * half else [])
    split = ir.node(
        "Split",
        [to.op("Reshape", x, to.ints(0, 0, heads, size)), to.ints(*parts)],
        {"axis": -1},
        num_outputs=len(parts),
    )
    to.steps.append(split)
    first, second, *rest = split.outputs
    for index, output in enumerate(split.outputs[1:], start=1):
        output.name = f"{node.outputs[0].name}.part.{index}"
    cos, sin = to.op("Unsqueeze", cos, to.ints(2)), to.op("Unsqueeze", sin, to.ints(2))  # (batch, sequence, 1, half)
    turned_first = to.op("Sub", to.op("Mul", first, cos), to.op("Mul", second, sin))
    turned_second = to.op("Add", to.op("Mul", second, cos), to.op("Mul", first, sin))
    return [to.op("Reshape", to.op("Concat", turned_first, turned_second, *rest, axis=-1), to.ints(0, 0, width))]


def _attention(to: Rewriter, node: ir.Node) -> list[ir.Value]:
    """Compute scaled dot-product attention over the extended cache.

    q: (batch, new, heads · size), k and v: (batch, new, kv heads · size), caches: (batch, kv heads, past, size). The queries of
    one kv head are stacked, (batch, kv heads, group · new, size), so that keys and values are never copied per query head.
    """
    query, key, value, mask, past_key, past_value = _inputs(node, 6)
    heads, kv_heads = (int(node.attributes.get_int(f"{kind}_num_heads", 0) or 0) for kind in ("q", "kv"))
    size, value_size = _last_size(past_key), _last_size(past_value)
    _require(node, min(heads, kv_heads, size, value_size) > 0 and not any(out.uses() for out in node.outputs[3:]))
    group = heads // kv_heads
    scale = _float(node, "scale", 0.0) or size**-0.5

    grouped = to.op("Reshape", to.op("Mul", query, to.scalar(scale)), to.ints(0, 0, kv_heads, group, size))
    stacked = to.op("Reshape", to.op("Transpose", grouped, perm=[0, 2, 3, 1, 4]), to.ints(0, kv_heads, -1, size))
    keys = to.op("Concat", past_key, _split_heads(to, key, kv_heads, size), axis=2)
    values = to.op("Concat", past_value, _split_heads(to, value, kv_heads, value_size), axis=2)
    scores = to.op(
        "MatMul", stacked, to.op("Transpose", keys, perm=[0, 1, 3, 2])
    )  # (batch, kv heads, group · new, total)
    cap = _float(node, "softcap", 0.0)
    if cap:
        scores = to.op("Mul", to.op("Tanh", to.op("Div", scores, to.scalar(cap))), to.scalar(cap))
    causal = int(node.attributes.get_int("is_causal", 0) or 0)
    seen = to.op("Softmax", to.op("Add", scores, _attention_bias(to, mask, group, causal)), axis=-1)
    mixed = to.op("Reshape", to.op("MatMul", seen, values), to.ints(0, kv_heads, group, -1, value_size))
    out = to.op("Reshape", to.op("Transpose", mixed, perm=[0, 3, 1, 2, 4]), to.ints(0, 0, heads * value_size))
    return [out, keys, values]


def _split_heads(to: Rewriter, x: ir.Value, heads: int, size: int) -> ir.Value:
    """Split the last axis: (batch, new, heads · size) → (batch, heads, new, size)."""
    return to.op("Transpose", to.op("Reshape", x, to.ints(0, 0, heads, size)), perm=[0, 2, 1, 3])


def _attention_bias(to: Rewriter, mask: ir.Value, group: int, causal: int) -> ir.Value:
    """Return the term added to the scores, (batch, 1, group · new, total); layers with the same mask share it.

    mask: (batch, 1, new, total), bool (True is visible) or float (added unchanged).
    """
    key = (id(mask), group, causal)
    if key not in to.masks:
        new, total = to.dim(mask, 2), to.dim(mask, 3)
        bias = mask
        later = _mask_of_later_keys(to, new, total) if causal else None
        if mask.dtype == ir.DataType.BOOL:
            seen = mask if later is None else to.op("And", mask, to.op("Not", later))
            bias = to.op("Where", seen, to.scalar(0.0), to.scalar(MASKED))
        elif later is not None:
            bias = to.op("Where", later, to.scalar(MASKED), mask)
        if group > 1:
            bias = to.op("Concat", *[bias] * group, axis=2)
        to.masks[key] = bias
    return to.masks[key]


def _mask_of_later_keys(to: Rewriter, new: ir.Value, total: ir.Value) -> ir.Value:
    """Return which keys come after each query, (new, total): query i is at position total − new + i."""
    end = to.op("Squeeze", total, to.ints(0))
    start = to.op("Squeeze", to.op("Sub", total, new), to.ints(0))
    queries = to.op("Unsqueeze", to.op("Range", start, end, to.scalar(1)), to.ints(1))
    return to.op("Greater", to.op("Range", to.scalar(0), end, to.scalar(1)), queries)


def _inputs(node: ir.Node, count: int) -> list[ir.Value]:
    values = [value for value in node.inputs[:count] if value is not None]
    _require(node, len(values) == count)
    return values


def _float(node: ir.Node, name: str, default: float) -> float:
    return float(node.attributes.get_float(name, default) or 0.0)


def _last_size(value: ir.Value) -> int:
    """Return the size of the last axis, 0 if the graph does not declare it."""
    size = value.shape[-1] if value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else 0


def _require(node: ir.Node, condition: bool) -> None:
    if not condition:
        raise ONNXExportError(
            f"{node.op_type} node {node.outputs[0].name!r} has a form that cannot be rewritten for older opsets",
            reason="EXPORT_ENGINE_UNSUPPORTED",
            remedy="use engine dynamo, or opset 23",
            about={"engine": "mobius", "operator": node.op_type},
        )


Rule = Callable[[Rewriter, ir.Node], list[ir.Value]]
# Operator → the opset that introduced it in the form used here, and the rule that rewrites it for older ones.
RULES: Mapping[str, tuple[int, Rule]] = {
    "Attention": (23, _attention),
    "RMSNormalization": (23, _rms_normalization),
    "RotaryEmbedding": (23, _rotary_embedding),
    "Gelu": (20, _gelu),
    "LayerNormalization": (17, _layer_normalization),
    "Split": (18, _split),
    "Shape": (15, _shape),
}
