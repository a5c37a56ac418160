"""The setting ``formats.onnx.activations``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from slipway.formats import Text, wrong_value
from slipway.model.activations.request import KINDS, MOST_LAYERS, is_layer
from slipway.settings.problems import did_you_mean

_NAMES = ("layers", "kinds")


def _checked(value: Any) -> Any:
    """Return the table with tuples of texts; refuse unknown names, layers and kinds."""
    if not isinstance(value, Mapping):
        raise wrong_value(value, "is not a table", "write it like {layers: [0, 5, 11], kinds: [attentions]}")
    for name in value:
        if name not in _NAMES:
            raise wrong_value(name, "is not a part of activations", did_you_mean(str(name), _NAMES))
    found = {name: tuple(dict.fromkeys(map(_text, _listed(part)))) for name, part in value.items()}
    for layer in found.get("layers", ()):
        if not is_layer(layer):
            raise wrong_value(layer, "is not a layer", f"use numbers from 0 to {MOST_LAYERS - 1}, last or all")
    for kind in found.get("kinds", ()):
        if kind not in KINDS:
            raise wrong_value(kind, "is not a kind of activations", did_you_mean(kind, tuple(KINDS)))
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(value: Any) -> str:
    """Write a layer's number as text; a request brings it as a decimal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool | int) else str(value)


Activations = Annotated[Mapping[str, tuple[Text, ...]], BeforeValidator(_checked)]


def activation_params(settings: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the stage's parameter; none without activations, so that plans made without them stay the same."""
    return {"activations": {name: list(part) for name, part in settings.items()}} if settings else {}
