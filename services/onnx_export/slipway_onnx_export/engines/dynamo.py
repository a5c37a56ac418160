"""Trace graphs with ``torch.onnx.export(dynamo=True)`` from a model without weights."""

from __future__ import annotations

from typing import Any

import onnxscript.rewriter.onnx_fusions
import torch

from slipway_onnx_export.activations.interface import with_activations
from slipway_onnx_export.components import components_of
from slipway_onnx_export.engine_graph import EngineGraph, GraphRequest
from slipway_onnx_export.engines.failures import OPTIMIZATION, engine_errors, translate_capture_error
from slipway_onnx_export.engines.guards import remove_guards
from slipway_onnx_export.engines.optimizing import optimize_graph
from slipway_onnx_export.engines.quiet import quiet_libraries
from slipway_onnx_export.interface import Component
from slipway_onnx_export.layered.blocks import split
from slipway_onnx_export.layered.stamping import stamped
from slipway_onnx_export.loading.weightless import build_weightless, tied_weights
from slipway_onnx_export.source import ModelSource
from slipway_onnx_export.statistics import Statistics

# FlatModule has the transformers model in this attribute.
PREFIX = "model."

EAGER = ("falcon",)
"""Model types whose fused attention broadcasts the one head of keys and values, which ONNX's Attention does not."""


def build(source: ModelSource, request: GraphRequest) -> list[EngineGraph]:
    """Trace the graphs of any model of a known family whose code torch.export supports."""
    # Only eager attention returns its weights, and gives all layers the same mask in every call.
    watched = request.activations is not None and "attentions" in request.activations.kinds
    usual = ("eager",) if watched or request.layered or source.config.model_type in EAGER else ("sdpa", "eager")
    whole = build_weightless(source, engine="dynamo", attention=request.attentions(*usual))
    attention = whole.config._attn_implementation
    weights = tied_weights(whole, source)
    parameters = {PREFIX + name for name, _ in whole.named_parameters(remove_duplicate=False)}
    graphs = []
    components = with_activations(components_of(whole, source, cache=request.cache), whole, request.activations)
    blocks = split(whole, components) if request.layered else None
    components = blocks.components if blocks else components
    for component in (each.fixed(request.sizes) for each in components):
        model = _trace(component, whole, source, opset=request.opset)
        initializers = model.graph.initializers
        for name in [name for name in initializers if name in parameters]:
            # Remove the placeholder values before optimizing, or they would be folded into the graph.
            initializers[name].const_value = None
            initializers[name].name = name.removeprefix(PREFIX)
        before = Statistics.of([model])
        if request.optimization != "none":
            with engine_errors(source, engine="dynamo", phase=OPTIMIZATION), quiet_libraries():
                optimize_graph(model)
                # into the operators of opset 23, if the graph is written in it
                onnxscript.rewriter.onnx_fusions.fuse(model)
        if request.runtime == "tensorrt":
            remove_guards(model)
        graphs.append(EngineGraph(component, model, weights, attention, unoptimized=before))
    return stamped(graphs, blocks) if blocks else graphs


def _trace(component: Component, whole: Any, source: ModelSource, *, opset: int) -> Any:
    """Return a graph as an onnx_ir model, before any optimization."""
    try:
        with quiet_libraries(), torch.no_grad():
            program = torch.onnx.export(
                component.module(whole),
                component.sample(),
                dynamo=True,
                dynamic_shapes=(tuple(port.varying for port in component.inputs),),
                input_names=[port.name for port in component.inputs],
                output_names=[port.name for port in component.outputs],
                opset_version=opset,
                optimize=False,
                verbose=False,
            )
    except Exception as error:  # torch.export lets any exception of the model's or its own code through
        raise translate_capture_error(
            source, error, attention=whole.config._attn_implementation, ports=component.inputs
        ) from error
    assert program is not None
    return program.model
