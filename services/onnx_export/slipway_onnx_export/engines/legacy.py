"""Trace graphs with the TorchScript exporter (``dynamo=False``), for opsets below 18; refuse a trace that depends on its sample."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from slipway.errors import TracerWarningError
from slipway.model.graphs.branches import Branch, harmful_branches
from slipway_onnx_export.engines.failures import OPTIMIZATION, translate_engine_errors, translate_tracer_error
from slipway_onnx_export.engines.optimizing import optimize_graph
from slipway_onnx_export.forms.activations import add_activations
from slipway_onnx_export.forms.components import components_of
from slipway_onnx_export.interface import Component, EngineGraph, GraphRequest
from slipway_onnx_export.ir_graphs import Statistics
from slipway_onnx_export.layered.blocks import split, stamp_layers
from slipway_onnx_export.loading.weightless import build_weightless, tied_weights
from slipway_onnx_export.source import ModelSource

# FlatModule has the transformers model in this attribute.
PREFIX = "model."


def build(source: ModelSource, request: GraphRequest) -> list[EngineGraph]:
    """Trace the graphs. Weights stay outside: the exporter leaves parameters as inputs."""
    whole = build_weightless(source, engine="legacy", attention=request.attentions("eager"))
    attention = whole.config._attn_implementation
    weights = tied_weights(whole, source)
    graphs = []
    components = add_activations(
        components_of(whole, source, cache=request.cache, pictures=request.pictures), whole, request.activations
    )
    blocks = split(whole, components) if request.layered else None
    components = blocks.components if blocks else components
    for component in (each.fix_axes(request.sizes) for each in components):
        model, warned = _trace(component, whole, source, opset=request.opset)
        if warned and not request.prove_warnings:
            raise tracer_warning_error(warned, attention=attention)
        graph = model.graph
        _restore_unread(graph, component)
        names = {port.name for port in component.inputs}
        for value in [value for value in graph.inputs if value.name not in names]:
            graph.inputs.remove(value)
            value.name = (value.name or "").removeprefix(PREFIX)
            if value.uses():
                graph.initializers[value.name] = value
        before = Statistics.of([model])
        if request.optimization != "none":
            with translate_engine_errors(source, engine="legacy", phase=OPTIMIZATION):
                optimize_graph(model)
        graphs.append(EngineGraph(component, model, weights, attention, tuple(map(str, warned)), before))
    return stamp_layers(graphs, blocks) if blocks else graphs


def _restore_unread(graph: ir.Graph, component: Component) -> None:
    """Declare the inputs again that the tracer dropped because the model does not read them."""
    declared = {value.name for value in graph.inputs}
    for port in component.inputs:
        if port.name in component.unread and port.name not in declared:
            kind = ir.DataType.INT64 if port.dtype == torch.int64 else ir.DataType.FLOAT
            graph.inputs.append(ir.Value(name=port.name, shape=ir.Shape(list(port.shape)), type=ir.TensorType(kind)))


def _trace(component: Component, whole: Any, source: ModelSource, *, opset: int) -> tuple[ir.Model, list[Branch]]:
    ports = (*component.inputs, *component.outputs)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught, torch.no_grad():
        path = Path(folder) / "graph.onnx"
        warnings.simplefilter("always")
        try:
            torch.onnx.export(
                component.module(whole),
                component.sample(),
                path,
                dynamo=False,
                export_params=False,
                keep_initializers_as_inputs=True,
                do_constant_folding=False,  # would fold the placeholders of the weights too
                input_names=[port.name for port in component.inputs],
                output_names=[port.name for port in component.outputs],
                dynamic_axes={port.name: port.varying for port in ports},
                opset_version=opset,
            )
        except Exception as error:  # the TorchScript exporter lets any exception of the model's or its own code through
            raise translate_tracer_error(source, error, attention=whole.config._attn_implementation) from error
        model = ir.from_proto(onnx.load(path))
    return model, harmful_branches(caught)


def tracer_warning_error(branches: Sequence[Branch], *, attention: str) -> TracerWarningError:
    """Return the error that refuses a trace for the first of these places."""
    first = branches[0]
    return TracerWarningError(
        f"the trace depends on its sample at {first.file}:{first.line}: {first.message}",
        remedy="use engine dynamo with opset 18 or later, or tracer_warnings prove",
        about={
            "engine": "legacy",
            "attention": attention,
            "kind": first.kind,
            "file": first.file,
            "line": first.line,
            "code": first.code,
            "places": "\n".join(map(str, branches)),
        },
    )
