"""Add activations to the interface of a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from slipway.models.activations.contract import ActivationContract, ContractOutput
from slipway.models.activations.request import ActivationRequest, activation_name
from slipway_onnx_export.activations.recording import Place, layers_of, places_of, recording, unsupported
from slipway_onnx_export.interface import IDS, MASK, SAMPLE_SIZES, SEQUENCE, Component, Observed, Port

Tensors = dict[str, torch.Tensor]


def with_activations(
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
    if len(components) != 1 or model.config.is_encoder_decoder:
        raise unsupported(model, "is made of an encoder and a decoder")
    (component,) = components
    inner = component.call
    assert inner is not None  # only engines that trace ask for activations
    count = len(layers_of(model)[1])
    wanted = request.outputs(count)
    places = places_of(model, wanted)

    def call(model: Any, tensors: Tensors) -> Tensors:
        with recording(places) as found:
            results = inner(model, tensors)
        return results | {place.name: _only(model, place, found, tensors[IDS]) for place in places}

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        names = [port.name for port in component.inputs]
        made = call(model, dict(zip(names, component.sample(), strict=True)))
        shapes = {place.name: tuple(map(int, made[place.name].shape)) for place in places}
    ports = tuple(Port(place.name, _axes(model, place, shapes[place.name], component)) for place in places)
    observed = Observed(count, dict(zip(wanted, (place.path for place in places), strict=True)))
    return (replace(component, outputs=(*component.outputs, *ports), call=call, observed=observed),)


def _only(model: Any, place: Place, found: dict[str, list[torch.Tensor]], ids: torch.Tensor) -> torch.Tensor:
    """Return the one value of a call; parts that take tokens of all rows in one list get their rows back."""
    values = found.get(place.name, [])
    if len(values) != 1:
        what = "does not return" if not values else f"computes {len(values)} times"
        raise unsupported(model, f"{what} the {place.kind.replace('_', ' ')} of {place.path}")
    value = values[0]
    return value.reshape(*ids.shape, value.shape[-1]) if value.dim() == 2 else value


def _axes(model: Any, place: Place, shape: tuple[int, ...], component: Component) -> tuple[str | int | None, ...]:
    ports = {port.name: port for port in component.inputs}
    rows, keys = ports[IDS].shape[0], ports[MASK].shape[1]
    if place.kind == "attentions":
        axes: tuple[str | int | None, ...] = (rows, shape[1] if len(shape) == 4 else 0, SEQUENCE, keys)
    else:
        axes = (rows, SEQUENCE, shape[-1])
    wanted = tuple(SAMPLE_SIZES[axis] if isinstance(axis, str) else axis for axis in axes)
    if shape != wanted:
        raise unsupported(model, f"gives {place.name} in the form {list(shape)} instead of {list(wanted)}")
    return axes


def contract_of(component: Component) -> ActivationContract | None:
    """Describe the additional outputs of a graph; None if it has none."""
    if component.observed is None:
        return None
    ports = {port.name: port for port in component.outputs}
    outputs = tuple(
        ContractOutput(
            name=activation_name(kind, layer),
            kind=kind,
            layer=layer,
            module=path,
            dtype="float32",
            shape=tuple(axis for axis in ports[activation_name(kind, layer)].shape if axis is not None),
        )
        for (kind, layer), path in component.observed.modules.items()
    )
    return ActivationContract(file=component.file, layers=component.observed.layers, outputs=outputs)
