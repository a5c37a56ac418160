"""Find an ONNX decoder's weights (constant operands of MatMul and Gemm, token embeddings), name its layers, and replace nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from slipway_quantize.graphs.folder import add_initializer
from slipway_quantize.levels import is_named
from slipway_quantize.report import KEPT
from slipway_quantize.sensitive import kept_names, sensitive_reason

_PASS_THROUGH = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze")


@dataclass(slots=True)
class Weight:
    """One constant matrix and the nodes that compute with it.

    Attributes:
        value: The initializer.
        transposed: Whether it is stored (K, N), input features first, as MatMul takes it; otherwise (N, K), as PyTorch
            and lookup tables store it.
        products: MatMul and Gemm nodes with the matrix as second operand.
        lookups: Gather nodes that look up token embeddings in it.
    """

    value: ir.Value
    transposed: bool
    products: list[ir.Node] = field(default_factory=list)
    lookups: list[ir.Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of the initializer."""
        assert self.value.name is not None
        return self.value.name

    @property
    def features(self) -> tuple[int, int]:
        """Return (N, K): output and input features."""
        assert self.value.shape is not None
        first, second = (int(size) for size in self.value.shape.numpy())
        return (second, first) if self.transposed else (first, second)


def find_weights(graph: ir.Graph) -> list[Weight]:
    """Find every weight matrix of ``graph``, in order of first use; a tied one appears once, with all its uses.

    A matrix is left out if anything but MatMul, Gemm or token lookup uses it too.
    """
    matrices: dict[tuple[str, bool], Weight] = {}
    for node in graph:
        use = _product_weight(node) or _lookup_table(node)
        if use is None:
            continue
        value, transposed = use
        assert value.name is not None
        weight = matrices.setdefault((value.name, transposed), Weight(value=value, transposed=transposed))
        (weight.lookups if node.op_type == "Gather" else weight.products).append(node)
    names = Counter(name for name, _ in matrices)
    return [weight for (name, _), weight in matrices.items() if names[name] == 1 and _has_no_other_use(weight)]


def _product_weight(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """Return the weight operand of a MatMul or plain Gemm, and whether it is stored (K, N)."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    operand = node.inputs[1] if len(node.inputs) > 1 else None
    if operand is None:
        return None
    transposed = True
    if node.op_type == "Gemm":
        plain = all(_attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))
        if not plain or _attribute(node, "transA", 0) != 0:
            return None
        transposed = _attribute(node, "transB", 0) == 0
    producer = operand.producer()
    if producer is not None and producer.op_type == "Transpose" and producer.domain == "":
        operand = producer.inputs[0]
        transposed = not transposed
    return (operand, transposed) if _is_matrix(operand) else None


def _lookup_table(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """Return the table in which a Gather looks up tokens: stored (N, K), one row per token."""
    if node.domain != "" or node.op_type != "Gather" or len(node.inputs) < 2 or _attribute(node, "axis", 0) != 0:
        return None
    table, indices = node.inputs[0], node.inputs[1]
    return (table, False) if _is_matrix(table) and _comes_from_tokens(indices) else None


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _is_matrix(value: ir.Value | None) -> TypeGuard[ir.Value]:
    return (
        value is not None
        and value.is_initializer()
        and value.const_value is not None
        and value.const_value.dtype == ir.DataType.FLOAT
        and len(value.const_value.shape) == 2
    )


def _comes_from_tokens(value: ir.Value | None) -> bool:
    """Return whether ``value`` is the graph's ``input_ids``, perhaps with another type or shape."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type not in _PASS_THROUGH:
            return False
        value = producer.inputs[0]
    return value is not None and value.is_graph_input() and value.name == "input_ids"


def _has_no_other_use(weight: Weight) -> bool:
    """Return whether only the weight's products and lookups use the matrix."""
    known = {id(node) for node in (*weight.products, *weight.lookups)}
    for user in weight.value.consumers():
        if id(user) in known:
            continue
        if user.op_type != "Transpose" or any(id(node) not in known for node in user.outputs[0].consumers()):
            return False
    return not weight.value.is_graph_output()


def is_kept(weight: str, keep: Collection[str]) -> bool:
    """Return whether a weight belongs to a linear layer of ``keep``, or to one that keeps its type by default."""
    return bool(kept_reason(weight, keep))


def kept_reason(weight: str, keep: Collection[str]) -> str:
    """Return why a weight keeps its type; empty if it does not."""
    modules = linear_layers_of(weight)
    if any(is_named(module, kept_names(keep)) for module in modules):
        return KEPT
    return next((why for module in modules if (why := sensitive_reason(module, keep))), "")


def linear_layers_of(weight: str) -> list[str]:
    """Return the linear layers of a weight by its name: ``layers.0.q_proj+k_proj.weight.T`` is of two."""
    path, _, last = weight.removesuffix(".T").removesuffix(".weight").rpartition(".")
    return [f"{path}.{name}" if path else name for name in last.split("+")]


def add_inline_constant(model: ir.Model, name: str, values: list[int]) -> ir.Value:
    """Add integers to the graph itself: runtimes read shapes before external data."""
    return add_initializer(model, ir.tensor(np.array(values, dtype=np.int64), name=name))


def replace_node(graph: ir.Graph, old: ir.Node, new: list[ir.Node]) -> None:
    """Replace ``old`` by ``new``; the output of the last new node takes over the name and all uses."""
    ir.convenience.replace_nodes_and_values(graph, old, [old], new, old.outputs, new[-1].outputs)


def remove_unused(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer that is no longer used, and its unused transposes."""
    for user in list(value.consumers()):
        if not user.outputs[0].uses():
            graph.remove(user, safe=True)
    if not value.uses():
        assert value.name is not None
        del graph.initializers[value.name]
