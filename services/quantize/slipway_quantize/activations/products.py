"""Replace products with constant matrices by products of codes: operators of ONNX itself, which every runtime knows.

Axes: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from slipway_quantize.activations.channels import Channels
from slipway_quantize.activations.codes import PLAIN, Form
from slipway_quantize.activations.ranges import Range
from slipway_quantize.graphs.folder import add_initializer
from slipway_quantize.graphs.nodes import add_inline_constant, remove_unused, replace_node
from slipway_quantize.graphs.weights import Weight


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
    """The range of a product's input is found while the graph runs."""

    form = PLAIN

    def __init__(self) -> None:
        self._made: dict[int, ir.Node] = {}

    def nodes(
        self, values: ir.Value, name: str, codes: ir.Value, scales: ir.Value, *, transposed: bool
    ) -> list[ir.Node]:
        """As :meth:`Products.nodes`."""
        del name
        nodes = []
        if not transposed:
            nodes.append(_turned(codes))
            codes = nodes[0].outputs[0]
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
            nodes, self._made[id(values)] = self._quantized(values, self._ranges[str(values.name)])
        # One for each product: ONNX Runtime does not fuse one that several products read.
        back = ir.node("DequantizeLinear", self._made[id(values)])
        assert scales.shape is not None
        if id(scales) not in self._zeros:
            zeros = self.form.codes.zeros(tuple(scales.shape.numpy()))  # (N,)
            self._zeros[id(scales)] = self._constant(f"{name}.{self.form.codes.ending}_zero", zeros)
        grid = [scales, self._zeros[id(scales)]]
        matrix = self._matrix(codes, grid, transposed=transposed)
        return [*nodes, back, *matrix, ir.node("MatMul", [back.outputs[0], matrix[-1].outputs[0]])]

    def _matrix(self, codes: ir.Value, grid: list[ir.Value], *, transposed: bool) -> list[ir.Node]:
        """Return the nodes that make a matrix (K, N) of codes."""
        if transposed:
            return [ir.node("DequantizeLinear", [codes, *grid], {"axis": 1})]
        if self.form.dequantized_first:
            matrix = ir.node("DequantizeLinear", [codes, *grid], {"axis": 0})
            return [matrix, _turned(matrix.outputs[0])]
        turned = _turned(codes)
        return [turned, ir.node("DequantizeLinear", [turned.outputs[0], *grid], {"axis": 1})]

    def _quantized(self, values: ir.Value, found: Range) -> tuple[list[ir.Node], tuple[ir.Value, ...]]:
        """Return nodes that make integers of values, and what turns them back: the integers, their step and their zero."""
        nodes: list[ir.Node] = []
        name, smoothed = values.name, values
        if found.factors is not None:
            inverse = self._constant(f"{name}.smoothing", (1 / found.factors).astype(np.float32))
            nodes.append(ir.node("Mul", [values, inverse]))
            smoothed = nodes[-1].outputs[0]
        grid = [
            self._constant(f"{name}.step", np.array(self.form.codes.step(found.largest))),
            self._constant(f"{name}.zero", self.form.codes.zeros()),
        ]
        nodes.append(ir.node("QuantizeLinear", [smoothed, *grid]))
        return nodes, (nodes[-1].outputs[0], *grid)

    def _constant(self, name: str, values: Any) -> ir.Value:
        return add_initializer(self._model, ir.tensor(values, name=name))


def replace_by_channels(model: ir.Model, weight: Weight, channels: Channels, products: Products) -> None:
    """Let all nodes that use a matrix use its codes; lookups only if the form of the products has them in codes."""
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
    return products.nodes(values, name, codes, scales, transposed=weight.transposed)


def _turned(matrix: ir.Value) -> ir.Node:
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
