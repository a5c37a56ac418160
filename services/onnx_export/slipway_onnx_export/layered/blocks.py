"""Split a text decoder into graphs: what comes before its layers, each layer, and what comes after them.

Layers of one kind differ only in their weights, so one of them is traced, and its graph is stamped for the others. Inputs and outputs
that no graph reads are left out. This module knows no model: a trial run shows what a model passes to its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import onnx_ir as ir
import torch
import transformers
from onnx_ir.passes.common import RemoveUnusedNodesPass

from slipway.errors import ONNXExportError
from slipway_onnx_export.forms.activations import layers_of
from slipway_onnx_export.interface import SAMPLE_SIZES, Component, EngineGraph, Port
from slipway_onnx_export.layered.calls import LayerCall, Place, Tensors, answer_calls, is_cache, replace_values, watch
from slipway_onnx_export.names import BATCH, LOGITS, PAST, SEQUENCE, TOTAL

FIRST, LAYER, LAST = "embedding", "layer", "head"
HIDDEN, NEXT, SHARED = "hidden_states", "next_hidden_states", "shared."
"""Names: hidden states that a graph takes, hidden states that a layer returns, prefix of tensors that the first graph computes for all."""

_OTHER_SIZES = {**SAMPLE_SIZES, BATCH: 3, SEQUENCE: 4, PAST: 7, TOTAL: 11}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The graphs that are traced.

    Attributes:
        path: Path of the model's list of layers.
        kinds: Numbers of the layers of each kind; the first is traced.
        components: Interfaces: the first graph, one layer of each kind, the last graph.
    """

    path: str
    kinds: tuple[tuple[int, ...], ...]
    components: tuple[Component, ...]


def split(model: Any, whole: Sequence[Component]) -> Blocks:
    """Split a model.

    Args:
        model: Transformers model; its weights are not read.
        whole: The graphs of the model as it is exported whole.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED`` if it is no decoder with a cache, or its layers are not one chain that takes tensors and a cache.
    """
    decoder = whole[0]
    if "past_key_values.0.key" not in {port.name for port in decoder.inputs}:
        raise _unsupported_error(model, "is no decoder with a cache")
    path, layers = layers_of(model)
    inputs, calls = watch(model, decoder, layers, SAMPLE_SIZES)
    _, others = watch(model, decoder, layers, _OTHER_SIZES)
    _check_chain(model, layers, calls)
    shared = dict(_name_shared(model, inputs, calls))
    ports: dict[str, Port] = {}
    first_places: dict[str, tuple[int, Place]] = {}
    for (index, place), name in shared.items():
        if name.startswith(SHARED) and name not in ports:
            pair = (calls[index].at(place), others[index].at(place))
            ports[name] = Port(name, _axes(model, name, *pair), pair[0].dtype)
            first_places[name] = index, place
    width = int(calls[0].hidden.shape[-1])
    given = {port.name: port for port in decoder.inputs}
    caches = {name: port for name, port in given.items() if name.startswith("past_key_values.")}
    plain = tuple(port for name, port in given.items() if name not in caches)
    length = caches["past_key_values.0.key"]

    def before(model: Any, tensors: Tensors) -> Tensors:
        whole = {**tensors, **dict.fromkeys(caches, tensors[length.name])}  # only the length of the cache is read
        own = [model.get_submodule(f"{path}.{index}") for index in range(len(layers))]
        assert decoder.call is not None
        with answer_calls(own, calls) as seen:
            decoder.call(model, whole)
        return {
            HIDDEN: seen[0].hidden,
            **{name: seen[index].at(place) for name, (index, place) in first_places.items()},
        }

    def after(model: Any, tensors: Tensors) -> Tensors:
        own = [model.get_submodule(f"{path}.{index}") for index in range(len(layers))]
        with answer_calls(own, calls, tensors[HIDDEN]):
            return {LOGITS: model(inputs_embeds=tensors[HIDDEN], use_cache=False).logits}

    hidden = Port(HIDDEN, (BATCH, SEQUENCE, width))
    logits = next(port for port in decoder.outputs if port.name == LOGITS)
    kinds = _group_layers(model, path, calls, shared)
    taken = {**given, **ports, HIDDEN: hidden}
    return Blocks(
        path,
        kinds,
        (
            Component(FIRST, (*plain, length), (hidden, *ports.values()), before),
            *(
                _layer(path, numbers[0], seen=calls[numbers[0]], shared=shared, taken=taken, decoder=decoder)
                for numbers in kinds
            ),
            Component(LAST, (hidden,), (logits,), after),
        ),
    )


def _layer(
    path: str,
    index: int,
    *,
    seen: LayerCall,
    shared: Mapping[tuple[int, Place], str],
    taken: Mapping[str, Port],
    decoder: Component,
) -> Component:
    own_in, own_out = (
        tuple(port for port in ports if port.name.startswith(f"{prefix}.{index}."))
        for ports, prefix in ((decoder.inputs, "past_key_values"), (decoder.outputs, "present"))
    )
    names = dict.fromkeys(name for (layer, _), name in shared.items() if layer == index)

    def call(model: Any, tensors: Tensors) -> Tensors:
        cache = transformers.DynamicCache([tuple(tensors[port.name] for port in own_in)] * (index + 1))

        def value(place: Place) -> Any:
            original = seen.at(place)
            if is_cache(original):
                return cache
            return tensors[shared[index, place]] if isinstance(original, torch.Tensor) else original

        args = replace_values(seen.args, value, ("args",))
        result = model.get_submodule(f"{path}.{index}")(*args, **replace_values(seen.kwargs, value, ("kwargs",)))
        own = cache.layers[index]
        given = dict(zip((port.name for port in own_out), (own.keys, own.values), strict=True))
        return {NEXT: result[0] if isinstance(result, tuple) else result, **given}

    inputs = (*(taken[name] for name in names), *own_in)
    return Component(f"{LAYER}_{index}", inputs, (replace(taken[HIDDEN], name=NEXT), *own_out), call)


def _check_chain(model: Any, layers: Sequence[Any], calls: Sequence[LayerCall]) -> None:
    """Refuse layers that do not run once each, in order, each on the result of the one before."""
    if len(calls) != len(layers):
        raise _unsupported_error(model, f"calls its {len(layers)} layers {len(calls)} times")
    for index, (one, following) in enumerate(pairwise(calls)):
        if following.hidden is not one.returned:
            raise _unsupported_error(model, f"changes the hidden states between layers {index} and {index + 1}")


def _name_shared(
    model: Any, inputs: Mapping[str, torch.Tensor], calls: Sequence[LayerCall]
) -> Iterator[tuple[tuple[int, Place], str]]:
    """Yield the name of each tensor that layers take, by layer and place. Equal names are the same tensor."""
    names = {id(tensor): name for name, tensor in inputs.items()}
    made = {id(value) for call in calls for value in (call.result if isinstance(call.result, tuple) else ())}
    for index, call in enumerate(calls):
        for place, value in call.places():
            if value is call.hidden:
                yield (index, place), HIDDEN
            elif id(value) in made and isinstance(value, torch.Tensor):
                raise _unsupported_error(
                    model, f"passes more than hidden states from layer to layer, first to layer {index}"
                )
            elif isinstance(value, torch.Tensor):
                if id(value) not in names:
                    name = SHARED + "_".join(map(str, place[1:]))
                    taken = set(names.values())
                    names[id(value)] = name if name not in taken else f"{name}_of_layer_{index}"
                yield (index, place), names[id(value)]
            elif not (value is None or is_cache(value) or isinstance(value, bool | int | float | str)):
                raise _unsupported_error(model, f"passes a {type(value).__name__} to its layers")


def _axes(model: Any, name: str, one: torch.Tensor, other: torch.Tensor) -> tuple[str | int, ...]:
    """Find the axes of a tensor by its sizes in two runs."""
    axes: list[str | int] = []
    for sizes in zip(map(int, one.shape), map(int, other.shape), strict=True):
        known = [axis for axis in (BATCH, SEQUENCE, PAST, TOTAL) if sizes == (SAMPLE_SIZES[axis], _OTHER_SIZES[axis])]
        if not known and sizes[0] != sizes[1]:
            raise _unsupported_error(
                model, f"passes {name.removeprefix(SHARED)} to its layers, one of whose sizes is not known"
            )
        axes.append(known[0] if known else sizes[0])
    return tuple(axes)


def _group_layers(
    model: Any, path: str, calls: Sequence[LayerCall], shared: Mapping[tuple[int, Place], str]
) -> tuple[tuple[int, ...], ...]:
    """Group the layers that differ only in their weights and their place."""
    groups: dict[Any, list[int]] = {}
    for index, call in enumerate(calls):
        layer = model.get_submodule(f"{path}.{index}")
        given = [
            (place, shared.get((index, place), "cache" if is_cache(value) else repr(value)))
            for place, value in call.places()
        ]
        groups.setdefault((*_constants(layer), str(given)), []).append(index)
    return tuple(map(tuple, groups.values()))


def _constants(layer: torch.nn.Module) -> tuple[Any, ...]:
    """Return all of a layer that becomes constant in its graph: its structure, settings, shapes and buffers."""
    settings = [
        (name, type(module).__name__, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if not key.startswith("_") and key != "layer_idx" and isinstance(value, bool | int | float | str | None)
    ]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    buffers = [(name, str(value.dtype), value.cpu().numpy().tobytes()) for name, value in layer.named_buffers()]
    return str(settings), str(shapes), tuple(buffers)


def _unsupported_error(model: Any, what: str) -> ONNXExportError:
    return ONNXExportError(
        f"{type(model).__name__} {what}, so it cannot be exported layer by layer",
        reason="FAMILY_UNSUPPORTED",
        remedy="export it whole: set layered to false",
        about={"architecture": type(model).__name__, "model_type": model.config.model_type},
    )


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
