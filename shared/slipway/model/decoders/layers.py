"""The kind of each layer of a decoder, as its ``config.json`` says: with attention, recurrent, with a short convolution. Data, and light."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import kinds_of_layers
from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway.model.decoders.values import ConfigValues
from slipway.model.limits import MOST_LAYERS

_OLDER = {"attention": "full_attention", "mamba": "linear_attention", "recurrent": "linear_attention"}
"""Names of kinds before transformers 5."""
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of ``hybrid_override_pattern`` in files of Nemotron-H."""

Rule = Callable[[Mapping[str, Any], int], Sequence[str]]


def _all(kind: str) -> Rule:
    return lambda _, layers: [kind] * layers


def _interval(settings: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Return full attention in the last layer of each interval (Qwen3-Next and after)."""
    interval = _whole(settings.get("full_attention_interval"), 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _period(settings: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Return attention in one layer of each period (Jamba)."""
    period, offset = _whole(settings.get("attn_layer_period"), 8), settings.get("attn_layer_offset", 4)
    return ["attention" if layer % period == offset else "mamba" for layer in range(layers)]


def _listed(key: str, other: str, *, all_by_default: bool) -> Rule:
    """Return attention in the layers that a setting lists, and another kind in the rest."""

    def rule(settings: Mapping[str, Any], layers: int) -> Sequence[str]:
        listed = settings.get(key)
        chosen = listed if isinstance(listed, list) else (range(layers) if all_by_default else ())
        return ["attention" if layer in chosen else other for layer in range(layers)]

    return rule


def _chunked(settings: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Return full attention in the layers that are not rotated, and attention in chunks of the text in the others (Llama 4)."""
    listed, interval = settings.get("no_rope_layers"), _whole(settings.get("no_rope_layer_interval"), 4)
    rotated = listed if isinstance(listed, list) and listed else [(layer + 1) % interval for layer in range(layers)]
    return ["chunked_attention" if each else "full_attention" for each in rotated[:layers]]


def _repeated(settings: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Return the kinds of a block again and again (RecurrentGemma, whose attention has a window)."""
    given = settings.get("block_types")
    block = given if isinstance(given, list) and given else ["recurrent", "recurrent", "attention"]
    kinds = {"attention": "sliding_attention"}
    return [kinds.get(str(block[layer % len(block)]), "recurrent") for layer in range(layers)]


def _each(period: int) -> Rule:
    """Return full attention in every layer of this number, and a window in the rest."""
    return lambda _, layers: [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
    ]


def _ending_in_full(period: int) -> Rule:
    """Return the same, with full attention in the last layer too (Gemma 4)."""
    return lambda settings, layers: [*_each(period)(settings, layers)[:-1], "full_attention"]


_RULES: Mapping[str, Rule] = {
    "bamba": _listed("attn_layer_indices", "mamba", all_by_default=False),
    "falcon_h1": _all("hybrid"),
    "falcon_mamba": _all("mamba"),
    "gemma3n": _each(5),
    "gemma4": _ending_in_full(6),
    "gpt_oss": _each(2),
    "granitemoehybrid": _all("mamba"),
    "jamba": _period,
    "llama4": _chunked,
    "lfm2": _listed("full_attn_idxs", "conv", all_by_default=True),
    "mamba": _all("mamba"),
    "mamba2": _all("mamba"),
    "qwen3_5": _interval,
    "qwen3_5_moe": _interval,
    "qwen3_next": _interval,
    "recurrent_gemma": _repeated,
}
"""Rules of types of models that hold if their ``config.json`` lists no kinds of layers."""


def layer_kinds(config: ModelConfig, kind: DecoderClass) -> tuple[str, ...]:
    """Return the kind of each layer as transformers 5 names it, by the list in ``config.json`` or else the rule of the type or class.

    Empty if the configuration gives no number of layers, or more than any model has.
    """
    return tuple(_OLDER.get(each, each) for each in _named_kinds(config, kind))


def _named_kinds(config: ModelConfig, kind: DecoderClass) -> Sequence[str]:
    settings = config.text
    for key in ("layers_block_type", "layer_types"):
        listed = settings.get(key)
        if isinstance(listed, list) and listed and not _ignores_kinds(kind):
            return [str(each) for each in listed]
    pattern = settings.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_PATTERN.get(letter, letter) for letter in pattern]
    layers = next(
        (_whole(settings.get(key), 0) for key in ("num_hidden_layers", "n_layer", "n_layers") if settings.get(key)), 0
    )
    if not 0 < layers <= MOST_LAYERS:
        return ()
    rule = _RULES.get(str(settings.get("model_type", "")).removesuffix("_text"))
    return rule(settings, layers) if rule else _by_class(config, kind, layers)


def _ignores_kinds(kind: DecoderClass) -> bool:
    """Return whether the code of a class gives all layers a window, or none, whatever ``layer_types`` says."""
    return kind.windowed is not Windowed.NEVER and kind.local is Local.ALL


def _by_class(config: ModelConfig, kind: DecoderClass, layers: int) -> tuple[str, ...]:
    """Return the kinds of layers with attention, by the rule for the windows of a class."""
    settings = {**kind.defaults, **config.text}
    asked = kind.windowed is Windowed.ALWAYS or (kind.windowed is Windowed.ASKED and settings.get("use_sliding_window"))
    if not asked or settings.get("sliding_window") is None:
        return ("full_attention",) * layers
    return tuple(kinds_of_layers(kind, settings, ConfigValues(CheckpointValidationError), layers))


def _whole(value: object, default: int) -> int:
    """Return a whole number from 1, or the default."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default
