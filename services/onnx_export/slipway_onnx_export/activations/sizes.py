"""Predict the size of activations from ``config.json``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.counts import counted
from slipway.estimates import FLOAT32_BYTES
from slipway.models.activations.request import ActivationRequest
from slipway.sizes import format_size

_EXAMPLE_TOKENS = 512
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
}


def describe_activations(params: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name of the check and the predicted size of a task's activations; None without activations.

    Raises:
        ConfigurationError: ``PARAMS_INVALID``: the model has no such layer.
    """
    request = ActivationRequest.of(params.get("activations") or {})
    if request is None:
        return None
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    found = {name: next((text[key] for key in keys if _is_count(text.get(key))), 0) for name, keys in _NAMES.items()}
    layers, heads, width = found["layers"], found["heads"], found["width"]
    if not all(found.values()):
        return "activations", "their size is not known, because config.json has other names for the model's sizes"
    kinds = [kind for kind, _ in request.outputs(layers)]
    maps = kinds.count("attentions")
    token = FLOAT32_BYTES * width * (len(kinds) - maps)
    pair = FLOAT32_BYTES * heads * maps
    parts = [f"{format_size(token)} for each token"] if token else []
    parts += [f"{format_size(pair)} for each pair of tokens"] if pair else []
    whole = _EXAMPLE_TOKENS * token + _EXAMPLE_TOKENS**2 * pair
    return "activations", (
        f"{counted(len(kinds), 'output')} with {' and '.join(parts)}: {format_size(whole)} for a text of {_EXAMPLE_TOKENS} tokens; "
        "the folder grows by less than 1 MB"
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
