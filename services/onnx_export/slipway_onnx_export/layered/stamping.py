"""Make each layer's graph from the traced one of its kind, and leave out inputs and outputs that no graph reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from slipway_onnx_export.engine_graph import EngineGraph
from slipway_onnx_export.interface import Component, Port
from slipway_onnx_export.layered.blocks import HIDDEN, LAYER, Blocks


def stamp_layers(graphs: Sequence[EngineGraph], blocks: Blocks) -> list[EngineGraph]:
    """Return the graphs in the order in which they run.

    Args:
        graphs: The traced graphs of :attr:`Blocks.components`. They are changed.
        blocks: The layers of each kind.
    """
    first, *kinds, last = (replace(graph, component=_drop_unread(graph.model, graph.component)) for graph in graphs)
    read = {port.name for graph in kinds for port in graph.component.inputs} | {HIDDEN}
    kept = tuple(port for port in first.component.outputs if port.name in read)
    outputs = first.model.graph.outputs
    outputs[:] = [value for value in outputs if value.name in {port.name for port in kept}]
    RemoveUnusedNodesPass()(first.model)
    component = replace(first.component, outputs=kept)
    first = replace(first, component=_drop_unread(first.model, component))
    digits = len(str(max(map(max, blocks.kinds))))
    layers = {
        index: _stamp(graph, blocks.path, numbers[0], index, digits)
        for graph, numbers in zip(kinds, blocks.kinds, strict=True)
        for index in numbers
    }
    return [first, *(layers[index] for index in sorted(layers)), last]


def _drop_unread(model: ir.Model, component: Component) -> Component:
    """Drop the inputs that a graph does not read."""
    read = {value.name for value in model.graph.inputs if value.uses() or value.is_graph_output()}
    model.graph.inputs[:] = [value for value in model.graph.inputs if value.name in read]
    return replace(component, inputs=tuple(port for port in component.inputs if port.name in read))


def _stamp(graph: EngineGraph, path: str, traced: int, index: int, digits: int) -> EngineGraph:
    model = graph.model if index == traced else graph.model.clone()

    def rename(name: str) -> str:
        for before, after in (
            (f"{path}.{traced}.", f"{path}.{index}."),
            (f"past_key_values.{traced}.", f"past_key_values.{index}."),
            (f"present.{traced}.", f"present.{index}."),
        ):
            if name.startswith(before):
                return after + name.removeprefix(before)
        return name

    def ports(given: tuple[Port, ...]) -> tuple[Port, ...]:
        return tuple(replace(port, name=rename(port.name)) for port in given)

    if index != traced:
        for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
            value.name = rename(value.name or "")
    old = graph.component
    component = replace(old, name=f"{LAYER}_{index:0{digits}}", inputs=ports(old.inputs), outputs=ports(old.outputs))
    return replace(graph, model=model, component=component)
