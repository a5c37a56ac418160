"""Replace products with constant matrices by products of integers: operators of ONNX itself, which every runtime knows.

Axes: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from slipway_quantize.activations.channels import Channels
from slipway_quantize.activations.ranges import Range
from slipway_quantize.graphs.folder import add_initializer
from slipway_quantize.graphs.nodes import add_inline_constant, remove_unused, replace_node
from slipway_quantize.graphs.weights import Weight


class Products(Protocol):
    """Makes the nodes of products of integers in one graph."""

    def nodes(self, values: ir.Value, name: str, codes: ir.Value, scales: ir.Value) -> list[ir.Node]:
        """Return nodes that multiply values (…, K) by a matrix of this name; the last one gives the result (…, N)."""
        ...


class DynamicProducts:
    """The range of a product's input is found while the graph runs."""

    def __init__(self) -> None:
        self._made: dict[int, ir.Node] = {}

    def nodes(self, values: ir.Value, name: str, codes: ir.Value, scales: ir.Value) -> list[ir.Node]:
        """As :meth:`Products.nodes`."""
        del name
        nodes = []
        if id(values) not in self._made:  # products of the same values share their integers
            self._made[id(values)] = ir.node("DynamicQuantizeLinear", [values], num_outputs=3)
            nodes.append(self._made[id(values)])
        integers, step, zero = self._made[id(values)].outputs
        product = ir.node("MatMulInteger", [integers, codes, zero])
        summed = ir.node("Cast", product.outputs, {"to": int(ir.DataType.FLOAT)})
        factor = ir.node("Mul", [step, scales])
        return [*nodes, product, summed, factor, ir.node("Mul", [summed.outputs[0], factor.outputs[0]])]


class StaticProducts:
    """The range of a product's input is known: pairs of QuantizeLinear and DequantizeLinear, which runtimes fuse with the product.

    Args:
        model: The graph.
        ranges: Range by the name of a value.
    """

    def __init__(self, model: ir.Model, ranges: Mapping[str, Range]) -> None:
        self._model, self._ranges = model, ranges
        self._made: dict[int, tuple[ir.Value, ...]] = {}
        self._zeros: dict[int, ir.Value] = {}

    def nodes(self, values: ir.Value, name: str, codes: ir.Value, scales: ir.Value) -> list[ir.Node]:
        """As :meth:`Products.nodes`."""
        nodes: list[ir.Node] = []
        if id(values) not in self._made:
            nodes, self._made[id(values)] = self._quantized(values, self._ranges[str(values.name)])
        # One for each product: ONNX Runtime does not fuse one that several products read.
        back = ir.node("DequantizeLinear", self._made[id(values)])
        assert scales.shape is not None
        if id(scales) not in self._zeros:
            zeros = np.zeros(tuple(scales.shape.numpy()), np.int8)  # (N,)
            self._zeros[id(scales)] = self._constant(f"{name}.i8_zero", zeros)
        matrix = ir.node("DequantizeLinear", [codes, scales, self._zeros[id(scales)]], {"axis": 1})
        return [*nodes, back, matrix, ir.node("MatMul", [back.outputs[0], matrix.outputs[0]])]

    def _quantized(self, values: ir.Value, found: Range) -> tuple[list[ir.Node], tuple[ir.Value, ...]]:
        """Return nodes that make integers of values, and what turns them back: the integers, their step and their zero."""
        nodes: list[ir.Node] = []
        name, smoothed = values.name, values
        if found.factors is not None:
            inverse = self._constant(f"{name}.smoothing", (1 / found.factors).astype(np.float32))
            nodes.append(ir.node("Mul", [values, inverse]))
            smoothed = nodes[-1].outputs[0]
        grid = [
            self._constant(f"{name}.step", np.array(found.scale, np.float32)),
            self._constant(f"{name}.zero", np.array(0, np.int8)),
        ]
        nodes.append(ir.node("QuantizeLinear", [smoothed, *grid]))
        return nodes, (nodes[-1].outputs[0], *grid)

    def _constant(self, name: str, values: Any) -> ir.Value:
        return add_initializer(self._model, ir.tensor(values, name=name))


def replace_by_channels(model: ir.Model, weight: Weight, channels: Channels, products: Products) -> None:
    """Let all nodes that use a matrix use its integers."""
    codes, scales = add_initializer(model, channels.codes), add_initializer(model, channels.scales)
    for node in list(weight.products):
        nodes = _product_nodes(node, weight, codes, scales, products=products, name=weight.name)
        replace_node(model.graph, node, [*nodes, *_bias_nodes(node, nodes[-1].outputs[0])])
    for node in list(weight.lookups):
        replace_node(model.graph, node, _lookup_nodes(model, node, codes, scales, weight))
    remove_unused(model.graph, weight.value)


def replace_by_joined(
    model: ir.Model, weights: Sequence[Weight], channels: Channels, products: Products, *, name: str
) -> None:
    """Let the products of several matrices with the same values be one, whose results are split.

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
    if weight.transposed:
        return products.nodes(values, name, codes, scales)
    turned = ir.node("Transpose", [codes], {"perm": [1, 0]})  # runtimes do this once, when they load
    return [turned, *products.nodes(values, name, turned.outputs[0], scales)]


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
