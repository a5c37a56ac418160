"""Replace products with constant matrices by products of codes: operators of ONNX itself, which every runtime knows.

Axes: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from slipway_quantize.activations.codes import PLAIN, Channels, Form, Range
from slipway_quantize.graphs.folder import add_initializer
from slipway_quantize.graphs.weights import Weight, add_inline_constant, remove_unused, replace_node

_MIDDLE = 128
_LEAST = 1e-30
_AXES_AS_VALUE = 18
"""First opset in which reductions take their axes as a value."""
_TOKENS = "tokens"
"""Beginning of the names of constants that all products of a graph share."""


class Products(Protocol):
    """Makes the nodes of products of codes in one graph."""

    form: Form

    def nodes(
        self, values: ir.Value, name: str, codes: ir.Value, scales: ir.Value, *, transposed: bool
    ) -> list[ir.Node]:
        """Return nodes that multiply values (…, K) by a matrix of this name; the last one gives the result (…, N).

        Args:
            values: The values.
            name: Name of the matrix.
            codes: Its codes.
            scales: Their scales (N,).
            transposed: Whether the codes are stored (K, N); otherwise (N, K).
        """
        ...


class DynamicProducts:
    """Products that measure the range of each token while the graph runs, so that padding and other texts in the batch do not change it.

    Values are divided by the token's step, so the pair of QuantizeLinear and DequantizeLinear has a constant step of 1, as runtimes
    need it to fuse it with the product; the result is multiplied by the token's step. ``DynamicQuantizeLinear`` has one range for all
    tokens, so that a long padded text would coarsen those beside it.

    Args:
        model: The graph.
    """

    form = PLAIN

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._made: dict[int, tuple[ir.Value, ir.Value]] = {}
        self._shared: dict[str, ir.Value] = {}

    def nodes(
        self, values: ir.Value, name: str, codes: ir.Value, scales: ir.Value, *, transposed: bool
    ) -> list[ir.Node]:
        """As :meth:`Products.nodes`."""
        del name
        nodes: list[ir.Node] = []
        if id(values) not in self._made:  # products of the same values share their integers
            nodes, self._made[id(values)] = self._quantize(values)
        integers, step = self._made[id(values)]
        back = ir.node("DequantizeLinear", [integers, self._one, self._middle])
        matrix = _matrix(codes, [scales], self.form, transposed=transposed)
        product = ir.node("MatMul", [back.outputs[0], matrix[-1].outputs[0]])
        return [*nodes, back, *matrix, product, ir.node("Mul", [product.outputs[0], step])]

    def _quantize(self, values: ir.Value) -> tuple[list[ir.Node], tuple[ir.Value, ir.Value]]:
        """Return nodes that make integers of values (…, K), the integers, and the tokens' steps (…, 1)."""
        largest, smallest = (self._reduce(kind, values) for kind in ("ReduceMax", "ReduceMin"))
        opposite = ir.node("Neg", smallest.outputs)
        least = self._constant("least", np.array(_LEAST, np.float32))  # a token of zeros is not divided by zero
        magnitude = ir.node("Max", [largest.outputs[0], opposite.outputs[0], least])
        codes = self._constant("codes", np.array(self.form.codes.largest, np.float32))
        step = ir.node("Div", [magnitude.outputs[0], codes])
        divided = ir.node("Div", [values, step.outputs[0]])
        # Unsigned, as the kernels on x86 take them, with the middle as zero.
        integers = ir.node("QuantizeLinear", [divided.outputs[0], self._one, self._middle])
        nodes = [largest, smallest, opposite, magnitude, step, divided, integers]
        return nodes, (integers.outputs[0], step.outputs[0])

    def _reduce(self, kind: str, values: ir.Value) -> ir.Node:
        if self._model.opset_imports.get("", _AXES_AS_VALUE) < _AXES_AS_VALUE:
            return ir.node(kind, [values], {"axes": [-1], "keepdims": 1})
        return ir.node(kind, [values, self._constant("last_axis", np.array([-1], np.int64))], {"keepdims": 1})

    @property
    def _one(self) -> ir.Value:
        return self._constant("step", np.array(1, np.float32))

    @property
    def _middle(self) -> ir.Value:
        return self._constant("zero", np.array(_MIDDLE, np.uint8))

    def _constant(self, name: str, values: Any) -> ir.Value:
        if name not in self._shared:
            self._shared[name] = add_initializer(self._model, ir.tensor(values, name=f"{_TOKENS}.{name}"))
        return self._shared[name]


class StaticProducts:
    """Products whose inputs have known ranges: pairs of QuantizeLinear and DequantizeLinear, which runtimes fuse with the product.

    Args:
        model: The graph.
        ranges: Range by the name of a value.
        form: How the runtime wants them.
    """

    def __init__(self, model: ir.Model, ranges: Mapping[str, Range], form: Form) -> None:
        self._model, self._ranges, self.form = model, ranges, form
        self._made: dict[int, tuple[ir.Value, ...]] = {}
        self._zeros: dict[int, ir.Value] = {}

    def nodes(
        self, values: ir.Value, name: str, codes: ir.Value, scales: ir.Value, *, transposed: bool
    ) -> list[ir.Node]:
        """As :meth:`Products.nodes`."""
        nodes: list[ir.Node] = []
        if id(values) not in self._made:
            nodes, self._made[id(values)] = self._quantize(values, self._ranges[str(values.name)])
        # One for each product: ONNX Runtime does not fuse a DequantizeLinear that several products read.
        back = ir.node("DequantizeLinear", self._made[id(values)])
        assert scales.shape is not None
        if id(scales) not in self._zeros:
            zeros = self.form.codes.zeros(tuple(scales.shape.numpy()))  # (N,)
            self._zeros[id(scales)] = self._constant(f"{name}.{self.form.codes.ending}_zero", zeros)
        grid = [scales, self._zeros[id(scales)]]
        matrix = _matrix(codes, grid, self.form, transposed=transposed)
        return [*nodes, back, *matrix, ir.node("MatMul", [back.outputs[0], matrix[-1].outputs[0]])]

    def _quantize(self, values: ir.Value, bounds: Range) -> tuple[list[ir.Node], tuple[ir.Value, ...]]:
        """Return nodes that make integers of values, and the inputs that dequantize them: integers, step and zero."""
        nodes: list[ir.Node] = []
        name, smoothed = values.name, values
        if bounds.factors is not None:
            inverse = self._constant(f"{name}.smoothing", (1 / bounds.factors).astype(np.float32))
            nodes.append(ir.node("Mul", [values, inverse]))
            smoothed = nodes[-1].outputs[0]
        grid = [
            self._constant(f"{name}.step", np.array(self.form.codes.step(bounds.largest))),
            self._constant(f"{name}.zero", self.form.codes.zeros()),
        ]
        nodes.append(ir.node("QuantizeLinear", [smoothed, *grid]))
        return nodes, (nodes[-1].outputs[0], *grid)

    def _constant(self, name: str, values: Any) -> ir.Value:
        return add_initializer(self._model, ir.tensor(values, name=name))


def replace_by_channels(model: ir.Model, weight: Weight, channels: Channels, products: Products) -> None:
    """Make all nodes that use a matrix use its codes; lookups only if the form has codes there."""
    codes, scales = add_initializer(model, channels.codes), add_initializer(model, channels.scales)
    for node in list(weight.products):
        nodes = _product_nodes(node, weight, codes, scales, products=products, name=weight.name)
        replace_node(model.graph, node, [*nodes, *_bias_nodes(node, nodes[-1].outputs[0])])
    for node in list(weight.lookups) if not products.form.dequantized_first else []:
        replace_node(model.graph, node, _lookup_nodes(model, node, codes, scales, weight))
    remove_unused(model.graph, weight.value)


def replace_by_joined(
    model: ir.Model, weights: Sequence[Weight], channels: Channels, products: Products, *, name: str
) -> None:
    """Join the products of several matrices with the same values into one, and split its results.

    ONNX Runtime turns signed integers of activations into unsigned ones, which its kernels on x86 take, only if one product reads them.
    """
    codes, scales = add_initializer(model, channels.codes), add_initializer(model, channels.scales)
    [first, *others] = [weight.products[0] for weight in weights]
    nodes = _product_nodes(first, weights[0], codes, scales, products=products, name=name)
    sizes = add_inline_constant(model, f"{name}.sizes", [weight.features[0] for weight in weights])
    split = ir.node("Split", [nodes[-1].outputs[0], sizes], {"axis": -1}, num_outputs=len(weights))
    own = [
        _bias_nodes(node, made) or [ir.node("Identity", [made])]
        for node, made in zip([first, *others], split.outputs, strict=True)
    ]
    model.graph.insert_before(first, [*nodes, split])
    for node, made in zip([first, *others], own, strict=True):
        replace_node(model.graph, node, made)
    for weight in weights:
        remove_unused(model.graph, weight.value)


def _product_nodes(
    node: ir.Node, weight: Weight, codes: ir.Value, scales: ir.Value, *, products: Products, name: str
) -> list[ir.Node]:
    values = node.inputs[0]
    assert values is not None
    return products.nodes(values, name, codes, scales, transposed=weight.transposed)


def _matrix(codes: ir.Value, grid: Sequence[ir.Value], form: Form, *, transposed: bool) -> list[ir.Node]:
    """Return the nodes that make a matrix (K, N) of codes and their grid: scales (N,), and zeros where the form has them."""
    if transposed:
        return [ir.node("DequantizeLinear", [codes, *grid], {"axis": 1})]
    if form.dequantized_first:
        matrix = ir.node("DequantizeLinear", [codes, *grid], {"axis": 0})
        return [matrix, _transpose(matrix.outputs[0])]
    turned = _transpose(codes)
    return [turned, ir.node("DequantizeLinear", [turned.outputs[0], *grid], {"axis": 1})]


def _transpose(matrix: ir.Value) -> ir.Node:
    return ir.node("Transpose", [matrix], {"perm": [1, 0]})  # runtimes do this once, when they load


def _bias_nodes(node: ir.Node, result: ir.Value) -> list[ir.Node]:
    """Return the node that adds the bias of a Gemm."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return [ir.node("Add", [result, bias])] if bias is not None else []


def _lookup_nodes(model: ir.Model, node: ir.Node, codes: ir.Value, scales: ir.Value, weight: Weight) -> list[ir.Node]:
    """Return nodes that look up rows of integers and their scales."""
    last = model.graph.initializers.get(f"{weight.name}.last_axis") or add_inline_constant(
        model, f"{weight.name}.last_axis", [-1]
    )
    rows = ir.node("Gather", [codes, node.inputs[1]])  # (…, K)
    values = ir.node("Cast", rows.outputs, {"to": int(ir.DataType.FLOAT)})
    steps = ir.node("Gather", [scales, node.inputs[1]])  # (…)
    column = ir.node("Unsqueeze", [steps.outputs[0], last])  # (…, 1)
    return [rows, values, steps, column, ir.node("Mul", [values.outputs[0], column.outputs[0]])]
