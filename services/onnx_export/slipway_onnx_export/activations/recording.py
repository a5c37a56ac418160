"""Record activations of a transformers model by forward hooks, while it is traced and while it is compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slipway.errors import ONNXExportError
from slipway.models.activations.request import Kind, activation_name

Wanted = tuple[tuple[Kind, int | None], ...]
"""Kind and layer of each output."""

_FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "fc2", "output.dense")
"""Names of the module in a layer whose output is that of its feed-forward part, by class of transformers."""


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


def layers_of(model: Any) -> tuple[str, list[torch.nn.Module]]:
    """Return the path and the layers of a model.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED`` if it has no such list, or several.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # takes longer than building a graph does

    lists = [
        (path, list(module))
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module)
        and all(isinstance(each, GradientCheckpointingLayer) for each in module)
    ]
    if len(lists) != 1:
        raise unsupported(model, f"has {len(lists)} lists of layers instead of one")
    return lists[0]


def places_of(model: Any, wanted: Iterable[tuple[Kind, int | None]]) -> tuple[Place, ...]:
    """Find the modules of activations.

    Raises:
        ONNXExportError: ``FAMILY_UNSUPPORTED``: the model has no module of this kind.
    """
    path, layers = layers_of(model)
    places = []
    for kind, layer in wanted:
        index = layer or 0
        name, owner = activation_name(kind, layer), layers[index]
        at = f"{path}.{index}"
        modules: tuple[torch.nn.Module, ...] = (owner,)
        if kind == "mlp":
            found = next((each for each in _FEED_FORWARD if _has(owner, each)), None)
            if found is None:
                raise unsupported(model, f"has no feed-forward module of a known name in {at}")
            at, modules = f"{at}.{found}", (owner.get_submodule(found),)
        elif kind == "attentions":
            named = [(part, each) for part, each in owner.named_modules() if "attention" in type(each).__name__.lower()]
            if not named:
                raise unsupported(model, f"has no attention in {at}")
            at, modules = f"{at}.{named[0][0]}", tuple(each for _, each in named)
        places.append(Place(name, at, modules, kind))
    return tuple(places)


@contextmanager
def recording(places: Iterable[Place]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record the activations of a model's calls, by name, until the caller clears them."""
    found: dict[str, list[torch.Tensor]] = {}
    with ExitStack() as stack:
        for place in places:
            for module in place.modules:
                if place.kind == "embeddings":
                    handle = module.register_forward_pre_hook(partial(_record_input, found, place), with_kwargs=True)
                else:
                    handle = module.register_forward_hook(partial(_record_output, found, place))
                stack.callback(handle.remove)
        yield found


def _record_input(
    found: dict[str, list[torch.Tensor]], place: Place, _module: Any, given: Any, named: dict[str, Any]
) -> None:
    found.setdefault(place.name, []).append(given[0] if given else named["hidden_states"])


def _record_output(found: dict[str, list[torch.Tensor]], place: Place, _module: Any, _given: Any, output: Any) -> None:
    parts = output if isinstance(output, tuple) else (output,)
    if place.kind != "attentions":
        found.setdefault(place.name, []).append(parts[0])
        return
    maps = [part for part in parts[1:] if isinstance(part, torch.Tensor) and part.dim() == 4]
    if maps and not found.get(place.name):  # a wrapper around the attention returns the same map again
        found[place.name] = maps[:1]


def _has(owner: torch.nn.Module, path: str) -> bool:
    try:
        owner.get_submodule(path)
    except AttributeError:
        return False
    return True


def unsupported(model: Any, what: str) -> ONNXExportError:
    """Return the error of a model whose activations are not known."""
    return ONNXExportError(
        f"{type(model).__name__} {what}, so its activations cannot be exported",
        reason="FAMILY_UNSUPPORTED",
        remedy="ask for other kinds of activations, or for none",
        about={"architecture": type(model).__name__, "model_type": model.config.model_type},
    )
