"""Record activations of a transformers model by forward hooks, while it is traced and while it is compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slipway.errors import ONNXExportError
from slipway.model.activations.request import CROSS, Activation, Part

WantedActivations = tuple[Activation, ...]

_FEED_FORWARD = (
    *("mlp", "feed_forward", "ffn", "block_sparse_moe", "fc2", "output.dense"),
    *("layer.2.DenseReluDense", "layer.1.DenseReluDense"),
)
"""Names of a layer's feed-forward module in transformers' classes."""

_CROSS = ("encoder_attn", "encdecattention", "crossattention")
"""Parts of the paths and class names of modules that attend to the encoder's results."""


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
