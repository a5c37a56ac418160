"""The request to an engine, and its result: a graph without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from slipway.model.activations.request import ActivationRequest
from slipway.model.graphs.promise import EVERY_CALL, Promise
from slipway_onnx_export.interface import Component
from slipway_onnx_export.loading.conversion import Weight
from slipway_onnx_export.params import Attention, Optimization, Runtime
from slipway_onnx_export.statistics import Statistics


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
