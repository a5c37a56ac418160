"""Give a graph the form for serving that was asked for."""

from __future__ import annotations

from dataclasses import replace

from slipway.errors import ONNXExportError
from slipway.model.families import DECODER
from slipway.model.graphs.promise import EVERY_CALL, Promise
from slipway_onnx_export.engine_graph import EngineGraph
from slipway_onnx_export.interface import Component
from slipway_onnx_export.loading.conversion import Weight
from slipway_onnx_export.names import LOGITS, POSITIONS
from slipway_onnx_export.serving.last_logits import keep_last_logits
from slipway_onnx_export.serving.projections import join_projections
from slipway_onnx_export.serving.shared_buffer import OPERATOR
from slipway_onnx_export.source import ModelSource


def check_family(source: ModelSource, promise: Promise) -> None:
    """Check that a model's family can have a form for serving.

    Raises:
        ONNXExportError: ``OPERATOR_UNSUPPORTED``.
    """
    if source.family is not DECODER and promise != EVERY_CALL:
        raise ONNXExportError(
            f"the model's family is {source.family.name}, and only decoders have a form for serving",
            reason="OPERATOR_UNSUPPORTED",
            remedy="set past_present_share_buffer to false and logits_to_keep to 0",
            about={"operator": OPERATOR if promise.shared_buffer else "MatMul"},
        )


def serve(made: EngineGraph, weights: dict[str, Weight], promise: Promise) -> EngineGraph:
    """Return a normalized graph in the form for serving; graph and weights are changed in place.

    Raises:
        ONNXExportError: ``OPERATOR_UNSUPPORTED`` if the graph has no such form.
    """
    if promise.shared_buffer:
        join_projections(made.model.graph, weights)
    if promise.last_logits:
        keep_last_logits(made.model.graph)
    takes_positions = any(value.name == POSITIONS for value in made.model.graph.inputs)
    return replace(made, component=_component(made.component, promise, takes_positions=takes_positions))


def _component(component: Component, promise: Promise, *, takes_positions: bool) -> Component:
    inputs, outputs = component.inputs, component.outputs
    if promise.shared_buffer and not takes_positions:
        inputs = tuple(port for port in inputs if port.name != POSITIONS)
    if promise.last_logits:
        outputs = tuple(
            replace(port, shape=(port.shape[0], 1, *port.shape[2:])) if port.name == LOGITS else port
            for port in outputs
        )
    return replace(component, inputs=inputs, outputs=outputs, promise=promise)
