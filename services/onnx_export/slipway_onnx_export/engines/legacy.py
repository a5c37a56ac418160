"""Trace graphs with ``torch.onnx.export(dynamo=False)``, the TorchScript exporter, for opsets below 18."""

from __future__ import annotations

import linecache
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch.jit._trace import TracerWarning

from slipway.errors import ONNXExportError, TracerWarningError, UnorderedMapError
from slipway_onnx_export.activations.interface import with_activations
from slipway_onnx_export.components import components_of
from slipway_onnx_export.engines import EngineGraph, GraphRequest
from slipway_onnx_export.engines.quiet import quiet_libraries
from slipway_onnx_export.interface import Component
from slipway_onnx_export.source import ModelSource
from slipway_onnx_export.weightless import build_weightless, tied_weights

# FlatModule has the transformers model in this attribute.
PREFIX = "model."

# Modules of transformers that branch on tensor values, but only on whether the cache is empty or a mask may be left out.
# Neither varies between calls of a decoder with cache and mask, and the parity check covers both.
HARMLESS = ("cache_utils.py", "masking_utils.py", "sdpa_attention.py")


def build(source: ModelSource, request: GraphRequest) -> list[EngineGraph]:
    """Trace the graphs. Weights stay outside: the exporter leaves parameters as inputs."""
    whole = build_weightless(source, engine="legacy", attention=("eager",))
    weights = tied_weights(whole, source)
    graphs = []
    for component in with_activations(components_of(whole, source), whole, request.activations):
        model = _trace(component, whole, source, opset=request.opset)
        graph = model.graph
        names = {port.name for port in component.inputs}
        for value in [value for value in graph.inputs if value.name not in names]:
            graph.inputs.remove(value)
            value.name = (value.name or "").removeprefix(PREFIX)
            if value.uses():
                graph.initializers[value.name] = value
        with quiet_libraries():
            onnxscript.optimizer.optimize_ir(model, onnx_shape_inference=False)
        graphs.append(EngineGraph(component, model, weights))
    return graphs


def _trace(component: Component, whole: Any, source: ModelSource, *, opset: int) -> ir.Model:
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
            raise translate_tracer_error(source, error) from error
        model = ir.from_proto(onnx.load(path))
    refuse_tracer_warnings(caught)
    return model


def translate_tracer_error(source: ModelSource, error: Exception) -> ONNXExportError:
    """Translate an exception of the TorchScript exporter into a typed error."""
    about = {"engine": "legacy", "architecture": source.architecture, "cause": type(error).__name__}
    text = str(error)
    if "unordered_map" in text:  # libstdc++ says unordered_map::at, others "invalid unordered_map<K, T> key"
        return UnorderedMapError(
            f"the legacy tracer lost a value of {source.architecture}: {text.splitlines()[0]}",
            remedy="use engine dynamo with opset 18 or later",
            about=about,
        )
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return ONNXExportError(
        f"the legacy tracer of torch {torch.__version__} failed on {source.architecture}: {first}",
        reason="EXPORT_ENGINE_FAILED",
        remedy="use engine dynamo with opset 18 or later",
        about=about,
    )


def refuse_tracer_warnings(caught: list[warnings.WarningMessage]) -> None:
    """Refuse the trace at the first tracer warning that is not known to be harmless.

    Raises:
        TracerWarningError: With file and line in ``about``.
    """
    for warning in caught:
        if not issubclass(warning.category, TracerWarning):
            continue
        place = Path(warning.filename)
        if place.name in HARMLESS and "transformers" in place.parts:
            continue
        if _only_guards(warning):
            continue
        raise TracerWarningError(
            f"the trace depends on its sample at {place.name}:{warning.lineno}: {str(warning.message).splitlines()[0]}",
            remedy="use engine dynamo with opset 18 or later",
            about={"engine": "legacy", "file": place.name, "line": warning.lineno},
        )


def _only_guards(warning: warnings.WarningMessage) -> bool:
    """Return whether the branch is an assertion or only raises: then it decides only whether to continue."""
    line, after = (linecache.getline(warning.filename, warning.lineno + step).strip() for step in (0, 1))
    return line.startswith("assert ") or (line.startswith("if ") and line.endswith(":") and after.startswith("raise "))
