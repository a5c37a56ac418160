"""Add activations to the interfaces of graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from slipway.model.activations.contract import ActivationContract, ContractOutput, GraphContract
from slipway.model.activations.request import CROSS, ActivationRequest, Part
from slipway_onnx_export.activations.recording import Place, layers_of, places_of, record_activations, unsupported_error
from slipway_onnx_export.interface import SAMPLE_SIZES, Component, ObservedActivations, Port
from slipway_onnx_export.loading.trial_run import try_out
from slipway_onnx_export.names import ENCODED, IDS, MASK

Tensors = dict[str, torch.Tensor]
Axis = str | int | None


def add_activations(
    components: tuple[Component, ...], model: Any, request: ActivationRequest | None
) -> tuple[Component, ...]:
    """Return the graphs with additional outputs.

    Args:
        components: The graphs of a model.
        model: Transformers model; its weights are not read.
        request: The activations; None for none.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED`` if the model's activations are not known.
        ConfigurationError: ``PARAMS_INVALID`` if it has no such layer.
    """
    if request is None:
        return components
    parts: tuple[Part, ...] = ("encoder", "decoder") if model.config.is_encoder_decoder else ("",)
    if len(components) != len(parts):
        raise unsupported_error(model, "has an encoder and a decoder in one graph")
    if CROSS in request.kinds and "decoder" not in parts:
        raise unsupported_error(model, "has no cross-attention")
    most = max(len(layers_of(model, part)[1]) for part in parts)
    return tuple(
        _add_outputs(component, model, request, part, most) for component, part in zip(components, parts, strict=True)
    )


def _add_outputs(component: Component, model: Any, request: ActivationRequest, part: Part, most: int) -> Component:
    inner = component.call
    assert inner is not None  # only engines that trace ask for activations
    count = len(layers_of(model, part)[1])
    wanted = request.outputs(count, part, most=most)
    if not wanted:
        return component
    places = places_of(model, wanted)

    def call(model: Any, tensors: Tensors) -> Tensors:
        with record_activations(places) as recorded:
            results = inner(model, tensors)
        values = {place.name: _only_value(model, place, recorded, tensors.get(IDS)) for place in places}
        # torch.export returns each tensor once, and the last layer's output may be the result itself.
        given = {id(value) for value in results.values()}
        return results | {name: value.clone() if id(value) in given else value for name, value in values.items()}

    def find_shapes() -> dict[str, tuple[int, ...]]:
        names = [port.name for port in component.inputs]
        made = call(model, dict(zip(names, component.sample(), strict=True)))
        return {place.name: tuple(map(int, made[place.name].shape)) for place in places}

    shapes = try_out(model, find_shapes)
    lengths = _lengths(component)
    ports = tuple(Port(place.name, _axes(model, place, shapes[place.name], lengths)) for place in places)
    observed = ObservedActivations(count, dict(zip(wanted, (place.path for place in places), strict=True)))
    return replace(component, outputs=(*component.outputs, *ports), call=call, observed=observed)


def _only_value(
    model: Any, place: Place, recorded: dict[str, list[torch.Tensor]], ids: torch.Tensor | None
) -> torch.Tensor:
    """Return the only value of a call. If it has the tokens of all rows in one list, it gets its rows back."""
    values = recorded.get(place.name, [])
    if len(values) != 1:
        what = "does not return" if not values else f"computes {len(values)} times"
        raise unsupported_error(model, f"{what} the {place.kind.replace('_', ' ')} of {place.path}")
    value = values[0]
    return value.reshape(*ids.shape, value.shape[-1]) if value.dim() == 2 and ids is not None else value


def _lengths(component: Component) -> tuple[Axis, Axis, Axis, Axis]:
    """Return the axes of rows, of tokens, and of the keys of attention and of cross-attention."""
    ports = {port.name: port.shape for port in (*component.inputs, *component.outputs)}
    rows, tokens = (ports[IDS] if IDS in ports else ports["last_hidden_state"])[:2]
    cached = ports.get("present.0.decoder.key")
    keys = ports[MASK][1] if MASK in ports else cached[2] if cached else tokens
    crossed = ports.get("past_key_values.0.encoder.key")
    return rows, tokens, keys, crossed[2] if crossed else ports.get(ENCODED, (rows, tokens))[1]


def _axes(model: Any, place: Place, shape: tuple[int, ...], lengths: tuple[Axis, Axis, Axis, Axis]) -> tuple[Axis, ...]:
    rows, tokens, keys, crossed = lengths
    axes: tuple[Axis, ...] = (rows, tokens, shape[-1])
    if place.kind in ("attentions", CROSS):
        axes = (rows, shape[1] if len(shape) == 4 else 0, tokens, crossed if place.kind == CROSS else keys)
    wanted = tuple(SAMPLE_SIZES[axis] if isinstance(axis, str) else axis for axis in axes)
    if shape != wanted:
        raise unsupported_error(model, f"gives {place.name} in the form {list(shape)} instead of {list(wanted)}")
    return axes


def contract_of(components: Iterable[Component]) -> ActivationContract | None:
    """Describe the additional outputs of graphs; None if they have none."""
    graphs = [_contract(each, each.observed) for each in components if each.observed is not None]
    return ActivationContract(**dict(graphs[0]), further=tuple(graphs[1:])) if graphs else None


def _contract(component: Component, observed: ObservedActivations) -> GraphContract:
    shapes = {port.name: port.shape for port in component.outputs}
    outputs = tuple(
        ContractOutput(
            name=each.name,
            kind=each.kind,
            layer=each.layer,
            module=path,
            dtype="float32",
            shape=tuple(axis for axis in shapes[each.name] if axis is not None),
        )
        for each, path in observed.modules.items()
    )
    return GraphContract(file=component.file, layers=observed.layers, outputs=outputs)
