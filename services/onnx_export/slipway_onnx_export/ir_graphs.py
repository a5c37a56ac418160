"""Help with onnx_ir graphs: add a constant, and count what a graph consists of, before and after its optimization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Statistics:
    """The nodes of some graphs.

    Attributes:
        nodes: Their number, those of subgraphs included.
        nbytes: Their size in a file, without weights.
        operators: How often each operator occurs, by name; operators outside of ONNX with their domain.
    """

    nodes: int = 0
    nbytes: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Iterable[ir.Model]) -> Statistics:
        """Count the nodes of some graphs."""
        nodes = [node for model in models for node in model.graph.all_nodes()]
        return cls(
            nodes=len(nodes),
            nbytes=sum(ir.serde.serialize_node(node).ByteSize() for node in nodes),
            operators=dict(sorted(Counter(map(_operator, nodes)).items())),
        )

    def __add__(self, other: Statistics) -> Statistics:
        operators = Counter(self.operators) + Counter(other.operators)
        return Statistics(self.nodes + other.nodes, self.nbytes + other.nbytes, dict(sorted(operators.items())))

    def record(self) -> dict[str, Any]:
        """Return it for ``onnx_export.json``."""
        return {"nodes": self.nodes, "size_bytes": self.nbytes, "operators": dict(self.operators)}


def _operator(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def add_constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add an initializer with this name and value to a graph; return it."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value
