"""Add activations to the interfaces of graphs, recorded by forward hooks while a model is traced and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from slipway.errors import ONNXExportError
from slipway.model.activations import (
    CROSS,
    Activation,
    ActivationContract,
    ActivationRequest,
    ContractOutput,
    GraphContract,
    Part,
)
from slipway_onnx_export.interface import SAMPLE_SIZES, Component, ObservedActivations, Port
from slipway_onnx_export.loading.weightless import try_out
from slipway_onnx_export.names import ENCODED, IDS, MASK

WantedActivations = tuple[Activation, ...]

_FEED_FORWARD = (
    *("mlp", "feed_forward", "ffn", "block_sparse_moe", "fc2", "output.dense"),
    *("layer.2.DenseReluDense", "layer.1.DenseReluDense"),
)
"""Names of a layer's feed-forward module in transformers' classes."""

_CROSS = ("encoder_attn", "encdecattention", "crossattention")
"""Parts of the paths and class names of modules that attend to the encoder's results."""

Tensors = dict[str, torch.Tensor]
Axis = str | int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A module whose input or output is an activation.

    Attributes:
        name: Name of the activation's output.
        path: The module's path in the model.
        modules: The module; for attention weights, each part of the layer that may return them.
        kind: The activation's kind.
    """

    name: str
    path: str
    modules: tuple[torch.nn.Module, ...]
    kind: str


def layers_of(model: Any, part: Part = "") -> tuple[str, list[torch.nn.Module]]:
    """Return the path and the layers of a model, or of a half of it.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED`` if it has no such list, or several.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # takes longer than building a graph does

    half = {"encoder": "get_encoder", "decoder": "get_decoder"}.get(part)
    inside = set(model.modules()) if half is None else set(getattr(model, half)().modules())
    lists = [
        (path, list(module))
        for path, module in model.named_modules()
        if module in inside
        and isinstance(module, torch.nn.ModuleList)
        and len(module)
        and all(isinstance(each, GradientCheckpointingLayer) for each in module)
    ]
    if len(lists) != 1:
        raise unsupported_error(
            model, f"has {len(lists)} lists of layers{f' in its {part}' if part else ''} instead of one"
        )
    return lists[0]


def places_of(model: Any, wanted: WantedActivations) -> tuple[Place, ...]:
    """Find the modules of activations.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED``: the model has no module of this kind.
    """
    lists = {part: layers_of(model, part) for part in dict.fromkeys(each.part for each in wanted)}
    places = []
    for each in wanted:
        path, layers = lists[each.part]
        owner, at = layers[each.layer or 0], f"{path}.{each.layer or 0}"
        modules: tuple[torch.nn.Module, ...] = (owner,)
        if each.kind == "mlp":
            feed_forward = next((name for name in _FEED_FORWARD if _has_module(owner, name)), None)
            if feed_forward is None:
                raise unsupported_error(model, f"has no feed-forward module of a known name in {at}")
            at, modules = f"{at}.{feed_forward}", (owner.get_submodule(feed_forward),)
        elif each.kind in ("attentions", CROSS):
            named = _attention_modules(owner, cross=each.kind == CROSS)
            if not named:
                raise unsupported_error(model, f"has no {'cross-' if each.kind == CROSS else ''}attention in {at}")
            at, modules = f"{at}.{next(iter(named))}", tuple(named.values())
        places.append(Place(each.name, at, modules, each.kind))
    return tuple(places)


def _attention_modules(layer: torch.nn.Module, *, cross: bool) -> dict[str, torch.nn.Module]:
    """Return the modules of a layer that compute attention to its own tokens or to the encoder's results, by path."""
    named = {path: each for path, each in layer.named_modules() if "attention" in type(each).__name__.lower()}
    return {
        path: each
        for path, each in named.items()
        if cross == any(word in f"{path} {type(each).__name__}".lower() for word in _CROSS)
    }


@contextmanager
def record_activations(places: Iterable[Place]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record the activations of a model's calls, by name, until the caller clears them."""
    values: dict[str, list[torch.Tensor]] = {}
    with ExitStack() as stack:
        for place in places:
            for module in place.modules:
                if place.kind == "embeddings":
                    handle = module.register_forward_pre_hook(partial(_record_input, values, place), with_kwargs=True)
                else:
                    handle = module.register_forward_hook(partial(_record_output, values, place))
                stack.callback(handle.remove)
        yield values


def _record_input(
    values: dict[str, list[torch.Tensor]], place: Place, _module: Any, given: Any, named: dict[str, Any]
) -> None:
    values.setdefault(place.name, []).append(given[0] if given else named["hidden_states"])


def _record_output(values: dict[str, list[torch.Tensor]], place: Place, _module: Any, _given: Any, output: Any) -> None:
    parts = output if isinstance(output, tuple) else (output,)
    if place.kind not in ("attentions", CROSS):
        values.setdefault(place.name, []).append(parts[0])
        return
    maps = [part for part in parts[1:] if isinstance(part, torch.Tensor) and part.dim() == 4]
    if maps and not values.get(place.name):  # a wrapper around the attention returns the same map again
        values[place.name] = maps[-1:]  # behind T5's bias by position


def _has_module(owner: torch.nn.Module, path: str) -> bool:
    try:
        owner.get_submodule(path)
    except AttributeError:
        return False
    return True


def unsupported_error(model: Any, what: str) -> ONNXExportError:
    """Return the error for a model whose activations are not known."""
    return ONNXExportError(
        f"{type(model).__name__} {what}, so its activations cannot be exported",
        reason="FAMILY_UNSUPPORTED",
        remedy="ask for other kinds of activations, or for none",
        about={"architecture": type(model).__name__, "model_type": model.config.model_type},
    )


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
