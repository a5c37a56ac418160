"""The request to an engine, and its result: a graph without weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from slipway.model.activations.request import ActivationRequest
from slipway.model.graphs.promise import EVERY_CALL, Promise
from slipway_onnx_export.interface import Component
from slipway_onnx_export.loading.conversion import Weight
from slipway_onnx_export.params import Attention, Optimization, Runtime


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


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """A request to an engine: the parameters that shape the graph, with the chosen opset and the activations to return."""

    opset: int
    runtime: Runtime
    optimization: Optimization = "all"
    attention: Attention = "auto"
    cache: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Fixed sizes of axes that do not vary, by name."""
    prove_warnings: bool = False
    promise: Promise = EVERY_CALL
    activations: ActivationRequest | None = None
    layered: bool = False

    def attentions(self, *default: str) -> tuple[str, ...]:
        """Return the attention implementations to try in turn: the requested one, or the engine's defaults."""
        return default if self.attention == "auto" else (self.attention,)


@dataclass(frozen=True, slots=True)
class EngineGraph:
    """A graph without weights.

    Attributes:
        component: Its interface.
        model: The graph. Inputs and outputs have the usual names; every weight is an initializer without a value.
        weights: The tensor of each such initializer (a view of the source's mapped files), by name.
        attention: The attention implementation that was traced; empty if the graph was built.
        unproven: Places where the trace depends on its sample, unless the comparison with PyTorch shows otherwise.
        unoptimized: The graph's nodes before it was optimized.
    """

    component: Component
    model: ir.Model
    weights: Mapping[str, Weight]
    attention: str = ""
    unproven: tuple[str, ...] = ()
    unoptimized: Statistics = field(default_factory=Statistics)
