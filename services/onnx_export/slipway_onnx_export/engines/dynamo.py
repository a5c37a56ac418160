"""Trace graphs with ``torch.onnx.export(dynamo=True)`` from a model without weights, and remove guards that TensorRT does not know.

torch masks scores with minus infinity, or the lowest float32. Where no position of a row is visible, the softmax may be NaN,
and a guard turns it into zeros: ``Where(IsNaN(p), 0, p)``. In float16 the guard stands between the softmax, computed in
float32, and the product with the values, and TensorRT-RTX 1.7 fails (``mha_fusion.cpp: CHECK(is_softmax(…))``). A mask within
float16's range needs none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.rewriter.onnx_fusions
import torch

from slipway_onnx_export.engines.failures import OPTIMIZATION, translate_capture_error, translate_engine_errors
from slipway_onnx_export.engines.lowering import MASKED
from slipway_onnx_export.engines.optimizing import optimize_graph, quiet_libraries
from slipway_onnx_export.forms.activations import add_activations
from slipway_onnx_export.forms.components import components_of
from slipway_onnx_export.forms.traceable import traceable
from slipway_onnx_export.interface import Component, EngineGraph, GraphRequest
from slipway_onnx_export.ir_graphs import Statistics, add_constant
from slipway_onnx_export.layered.blocks import split, stamp_layers
from slipway_onnx_export.loading.weightless import build_weightless, tied_weights
from slipway_onnx_export.source import ModelSource

# FlatModule has the transformers model in this attribute.
PREFIX = "model."

EAGER = ("falcon",)
"""Model types whose fused attention broadcasts its one head of keys and values; ONNX's Attention does not."""

_PASS = ("Identity", "Cast", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Slice", "Concat", "Tile")
"""Operators that copy the values of a mask."""


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
    with traceable(whole):
        components = add_activations(
            components_of(whole, source, cache=request.cache, pictures=request.pictures), whole, request.activations
        )
        blocks = split(whole, components) if request.layered else None
        components = blocks.components if blocks else components
        for component in (each.fix_axes(request.sizes) for each in components):
            model = _trace(component, whole, source, opset=request.opset)
            initializers = model.graph.initializers
            for name in [name for name in initializers if name in parameters]:
                # Remove the placeholder values before optimizing, or they would be folded into the graph.
                initializers[name].const_value = None
                initializers[name].name = name.removeprefix(PREFIX)
            before = Statistics.of([model])
            if request.optimization != "none":
                with translate_engine_errors(source, engine="dynamo", phase=OPTIMIZATION), quiet_libraries():
                    optimize_graph(model)
                    # fuses into operators of opset 23, if the graph is written in it
                    onnxscript.rewriter.onnx_fusions.fuse(model)
            if request.runtime == "tensorrt":
                remove_guards(model)
            graphs.append(EngineGraph(component, model, weights, attention, unoptimized=before))
    return stamp_layers(graphs, blocks) if blocks else graphs


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


def remove_guards(model: ir.Model) -> int:
    """Mask scores with a finite value, in place, wherever a guard follows the softmax; return the number of removed guards.

    Rows without a visible position, which are padding, then become means over all positions instead of zeros. A guard stays if its
    mask does not choose between 0 and a value that hides.
    """
    graph = model.graph
    removed = 0
    for guard in list(graph):
        softmax = _guarded_softmax(guard)
        masks = _masks(softmax) if softmax is not None else []
        if softmax is None or not masks:
            continue
        for mask, index in masks:
            hiding = mask.inputs[index]
            mask.replace_input_with(index, _finite_mask_value(graph))
            if hiding is not None and hiding.is_initializer() and not hiding.uses():
                del graph.initializers[str(hiding.name)]
        unknown = guard.inputs[0]
        guard.outputs[0].replace_all_uses_with(softmax.outputs[0])
        graph.remove(guard, safe=True)
        producer = unknown.producer() if unknown is not None else None
        if producer is not None and not producer.outputs[0].uses():
            graph.remove(producer, safe=True)
        removed += 1
    return removed


def _guarded_softmax(node: ir.Node) -> ir.Node | None:
    """Return the softmax whose NaNs this node replaces by zeros; None if it does something else."""
    if node.op_type != "Where" or node.domain or node.outputs[0].is_graph_output():
        return None
    unknown, zero, values = node.inputs
    test = unknown.producer() if unknown is not None else None
    if values is None or test is None or test.op_type != "IsNaN" or test.inputs[0] is not values or _number(zero) != 0:
        return None
    softmax = values.producer()
    return softmax if softmax is not None and softmax.op_type == "Softmax" else None


def _masks(softmax: ir.Node) -> list[tuple[ir.Node, int]]:
    """Return the nodes that choose between 0 and a value that hides, each with the index of the latter; empty if any is unknown."""
    scores = softmax.inputs[0]
    added = scores.producer() if scores is not None else None
    if added is None or added.op_type != "Add":
        return []
    for side in added.inputs:
        if side is not None and (choices := _choices(side)):
            return choices
    return []


def _choices(value: ir.Value) -> list[tuple[ir.Node, int]]:
    node = value.producer()
    if node is None:
        return []
    if node.op_type == "Where":
        for index, other in ((2, 1), (1, 2)):
            hiding = _number(node.inputs[index])
            if _number(node.inputs[other]) == 0 and hiding is not None and hiding <= MASKED:
                return [(node, index)]
        return []
    if node.op_type not in _PASS:
        return []
    copied = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    choices = [_choices(each) if each is not None else [] for each in copied]
    return [choice for each in choices for choice in each] if all(choices) else []


def _number(value: ir.Value | None) -> float | None:
    """Return the only number of a constant; None for any other value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


def _finite_mask_value(graph: ir.Graph) -> ir.Value:
    """Return the constant that is added to the scores of masked positions; all masks share it."""
    name = "attention.masked"
    return graph.initializers.get(name) or add_constant(graph, name, np.array(MASKED, np.float32))
