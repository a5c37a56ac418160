"""Engines that make the graphs of a model; they never read its weights.

Each takes a :class:`~slipway_onnx_export.source.ModelSource` and a :class:`~slipway_onnx_export.interface.GraphRequest` and returns
an :class:`~slipway_onnx_export.interface.EngineGraph` for every graph: named initializers that have no value, and the tensor of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from slipway.errors import ONNXExportError
from slipway.model.families import DECODER
from slipway_onnx_export.engines.failures import translate_engine_errors
from slipway_onnx_export.interface import EngineGraph, GraphRequest
from slipway_onnx_export.params import BEST_OPSET, ENGINE_OPSETS, OnnxExportParams, Runtime
from slipway_onnx_export.source import ModelSource


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to make a graph.

    Attributes:
        name: Value of the stage's ``engine`` parameter.
        opsets: Opsets that it can write, ascending.
        preferred: Default opset, by runtime.
        module: Module with ``build(source, request) -> list[EngineGraph]``; imported at first use.
    """

    name: str
    opsets: tuple[int, ...]
    preferred: Mapping[Runtime, int]
    module: str

    def build(self, source: ModelSource, request: GraphRequest) -> list[EngineGraph]:
        """Make the graphs.

        Raises:
            ONNXExportError: ``EXPORT_ENGINE_UNSUPPORTED`` if the engine does not support the architecture,
                ``EXPORT_ENGINE_FAILED`` if it stops with an error of its own.
        """
        build: Callable[[ModelSource, GraphRequest], list[EngineGraph]] = import_module(self.module).build
        with translate_engine_errors(source, engine=self.name):
            return build(source, request)


_HERE = __name__
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "mobius", tuple(ENGINE_OPSETS["mobius"]), {"onnxruntime": BEST_OPSET, "tensorrt": 20}, f"{_HERE}.mobius"
        ),
        Engine(
            "dynamo", tuple(ENGINE_OPSETS["dynamo"]), {"onnxruntime": BEST_OPSET, "tensorrt": 20}, f"{_HERE}.dynamo"
        ),
        Engine("legacy", tuple(ENGINE_OPSETS["legacy"]), {"onnxruntime": 17, "tensorrt": 17}, f"{_HERE}.legacy"),
    )
}

# TensorRT-RTX 1.7 has no fp32 kernel for the Attention operator of opset 23; it parses opset 20 in full.
TENSORRT_MAX_OPSET = 20


def choose_engine(source: ModelSource, params: OnnxExportParams) -> Engine:
    """Return the requested engine; for ``auto``, mobius if it can build this graph, otherwise the tracer that writes the opset."""
    if params.engine != "auto":
        return ENGINES[params.engine]
    mobius = ENGINES["mobius"]
    if params.past_present_share_buffer:
        return mobius
    traced = params.layered or not params.cache or params.attention != "auto" or bool(params.activations)
    if source.family is DECODER and not traced and import_module(mobius.module).supports(source):
        return mobius
    return ENGINES["legacy" if params.opset in ENGINE_OPSETS["legacy"] else "dynamo"]


def choose_opset(engine: Engine, opset: int | None, *, runtime: Runtime) -> int:
    """Return the requested opset, or the engine's preferred one.

    Raises:
        ONNXExportError: ``OPSET_UNSUPPORTED``; ``about`` lists the engine's opsets for this runtime.
    """
    limit = TENSORRT_MAX_OPSET if runtime == "tensorrt" else max(engine.opsets)
    supported = tuple(number for number in engine.opsets if number <= limit)
    chosen = engine.preferred.get(runtime) if opset is None else opset
    if chosen in supported:
        return chosen
    span = opset_span(supported)
    raise ONNXExportError(
        f"engine {engine.name} cannot write opset {chosen or f'≤ {limit}'} for {runtime}"
        + (f"; it writes {span}" if span else ""),
        reason="OPSET_UNSUPPORTED",
        remedy="choose another engine" + (f" or an opset in {span}" if span else ""),
        about={"engine": engine.name, "opset": chosen or limit, "supported_opsets": span, "runtime": runtime},
    )


def opset_span(opsets: tuple[int, ...]) -> str:
    """Format opsets as ``18-23``; empty if there are none. Engines support contiguous ranges."""
    return f"{min(opsets)}-{max(opsets)}" if opsets else ""
