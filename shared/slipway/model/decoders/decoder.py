"""The sizes of a decoder, and how far each of its layers looks back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway.model.decoders.rotary import Rotary, rotary_of
from slipway.model.decoders.values import ConfigValues
from slipway.model.limits import MOST_LAYERS, MOST_PARTS

LOCAL, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder of a known class.

    Attributes:
        kind: Its class.
        settings: Its ``config.json``, with the defaults of its class.
        layers: Number of layers.
        hidden: Width of the states between layers.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values.
        width: Width of a head.
        inner: Width of the states within a feed-forward network.
        vocabulary: Rows of the embedding.
        positions: Most tokens of a text.
        tied: Whether the embedding is the head too, unless a head is stored.
        rotary: Its rotary embedding.
        windows: Tokens that each layer looks back; empty if all layers see the whole text.
    """

    kind: DecoderClass
    settings: Mapping[str, Any]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    vocabulary: int
    positions: int
    tied: bool
    rotary: Rotary
    windows: tuple[int, ...]


def settings_of(config: ModelConfig, kind: DecoderClass) -> dict[str, Any]:
    """Return the settings of a decoder by their usual names, with the defaults of its class."""
    own = {name: config[other] for other, name in kind.names.items() if config.get(other) is not None}
    settings = {**kind.defaults, **config, **own}
    return {**settings, "num_key_value_heads": kind.kv_heads(settings)} if kind.kv_heads else settings


def decoder_of(config: ModelConfig, values: ConfigValues, kind: DecoderClass) -> Decoder:
    """Return the decoder with this configuration, or a model that is built like one, such as an encoder.

    Args:
        config: Its configuration.
        values: Reads settings, with the errors that a format raises: ``BASE_MODEL_INVALID`` for a number that no model can have.
        kind: Its class.
    """
    settings = settings_of(config, kind)
    none = None if kind.attends else 1
    heads = values.whole(settings, "num_attention_heads", "n_head", default=none, most=MOST_PARTS)
    hidden = values.whole(settings, "hidden_size", "n_embd")
    kv_heads = values.whole(settings, "num_key_value_heads", default=heads, most=heads)
    if heads % kv_heads:
        raise values.invalid("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
    width = values.whole(settings, kind.width, default=max(1, hidden // heads))
    listed = settings.get("layers_block_type") or settings.get("hybrid_override_pattern") or ()
    default = len(listed) if isinstance(listed, list | str) and listed else None  # Nemotron-H counts its list
    layers = values.whole(settings, "num_hidden_layers", "n_layer", default=default, most=MOST_LAYERS)
    positions = values.whole(settings, "max_position_embeddings", "n_positions", default=kind.positions or None)
    return Decoder(
        kind=kind,
        settings=settings,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        inner=values.whole(_of_all_layers(settings), "intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=values.whole(settings, "vocab_size"),
        positions=positions,
        tied=values.flag(settings, "tie_word_embeddings"),
        rotary=rotary_of(settings, width, values, turned=kind.turned),
        windows=_windows(kind, settings, values, layers=layers, positions=positions),
    )


def _of_all_layers(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings in which ``intermediate_size`` is one number, if it lists the same one for each layer (Gemma 3n)."""
    listed = settings.get("intermediate_size")
    same = isinstance(listed, list) and listed and all(each == listed[0] for each in listed)
    return {**settings, "intermediate_size": listed[0]} if isinstance(listed, list) and same else settings


def kinds_of_layers(kind: DecoderClass, settings: Mapping[str, Any], values: ConfigValues, layers: int) -> list[str]:
    """Return the kinds of attention of the layers of a model with a window, by the rule of its class, which ``layer_types`` may replace."""
    kinds = [_kind(kind, settings, values, layer) for layer in range(layers)]
    return [*kinds[:-1], FULL] if kind.local is Local.PERIOD_AND_LAST else kinds


def _windows(
    kind: DecoderClass, settings: Mapping[str, Any], values: ConfigValues, *, layers: int, positions: int
) -> tuple[int, ...]:
    """Return how far each layer looks back, as ``layer_types`` or the rule of the class says."""
    asked = kind.windowed is not Windowed.ASKED or values.flag(settings, "use_sliding_window")
    if kind.windowed is Windowed.NEVER or not asked or settings.get("sliding_window") is None:
        return ()
    window, kinds = values.whole(settings, "sliding_window"), settings.get("layer_types")
    if kinds is None or kind.local is Local.ALL:
        kinds = kinds_of_layers(kind, settings, values, layers)
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {LOCAL, FULL}:
        raise values.invalid("layer_types", kinds, f"a list of {layers} of {LOCAL} and {FULL}")
    reach = tuple(min(window, positions) if each == LOCAL else positions for each in kinds)
    return reach if min(reach) < positions else ()


def _kind(kind: DecoderClass, settings: Mapping[str, Any], values: ConfigValues, layer: int) -> str:
    """Return the attention of a layer by the rule of its class."""
    match kind.local:
        case Local.ALL:
            local = True
        case Local.PERIOD | Local.PERIOD_AND_LAST:
            local = (layer + 1) % kind.period != 0
        case Local.LAST:
            local = layer >= _first(settings, values)
        case Local.FIRST_ODD:
            local = layer % 2 == 0 and layer < _first(settings, values)
        case Local.UNROTATED:
            rotated = settings.get("no_rope_layers")
            if isinstance(rotated, list) and layer < len(rotated):
                local = not rotated[layer]
            else:
                local = (layer + 1) % values.whole(settings, "no_rope_layer_interval") == 0
    return LOCAL if local else FULL


def _first(settings: Mapping[str, Any], values: ConfigValues) -> int:
    layers = settings.get("max_window_layers")
    if isinstance(layers, int) and not isinstance(layers, bool) and layers >= 0:
        return layers
    raise values.invalid("max_window_layers", layers, "a whole number from 0")
