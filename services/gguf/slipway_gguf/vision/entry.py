"""What an entry of the table of image encoders says: settings, keys of the metadata, and the place of each tensor. Light: no numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.texts import quoted
from slipway_gguf.architectures.entry import CONFIG_VALUES, WHOLE, Piece

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation of the colours of the images that CLIP was trained with, which are the default of several processors."""
_BASE = 10000.0
"""Base of the frequencies of the rotary embedding of all encoders that have one; llama.cpp has no key for it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A model's settings for images, for entries of the table.

    Attributes:
        config: The ``config.json`` of the whole model.
        vision: The settings of its image encoder, with the defaults of the encoder's class.
        processor: The settings of its image processor.
        tokens: Numbers of the tokenizer's added tokens, by their text.
    """

    config: ModelConfig
    vision: Mapping[str, Any]
    processor: Mapping[str, Any]
    tokens: Mapping[str, int]

    @property
    def layers(self) -> int:
        """Number of layers of the encoder."""
        return self.whole("depth", "num_hidden_layers")

    @property
    def heads(self) -> int:
        """Number of heads of a layer."""
        return self.whole("num_heads", "num_attention_heads")

    def whole(self, *keys: str) -> int:
        """Return the first of these settings that is there: a whole number from 1."""
        return CONFIG_VALUES.whole(self.vision, *keys)

    def number(self, key: str) -> float:
        """Return a setting that is a finite number."""
        return CONFIG_VALUES.number(self.vision, key)

    def listed(self, key: str) -> tuple[int, ...]:
        """Return a setting that is a list of layers; an empty one if it is left out."""
        values = self.vision.get(key) or ()
        if isinstance(values, list | tuple) and all(
            isinstance(each, int) and 0 <= each < self.layers for each in values
        ):
            return tuple(values)
        raise CONFIG_VALUES.invalid(key, values, f"a list of numbers of the {self.layers} layers")


Key = Callable[[Seen], Any]
Pieces = Callable[[Seen], Piece]
Layers = Callable[[Seen], Sequence[int]]


def as_stored(_: Seen) -> Piece:
    """Return the piece for a tensor whose values and order the file keeps."""
    return WHOLE


def unfolded(seen: Seen) -> Piece:
    """Return the piece for a matrix that multiplies patches, as a convolution. (out, height · width · in) → (out, in, height, width)."""
    size = seen.whole("patch_size")
    return Piece(form=lambda whole: whole.reshape(len(whole), size, size, -1).transpose(0, 3, 1, 2))


def every_layer(seen: Seen) -> Sequence[int]:
    """Return the numbers of all layers."""
    return range(seen.layers)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the file that is made from one tensor of the model.

    Attributes:
        name: Its name with its ending; ``{}`` stands for the number of a layer.
        piece: Returns what of the model's tensor it consists of.
        offset: Number to add to each value.
    """

    name: str
    piece: Pieces = as_stored
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors of the model that follow one pattern.

    Attributes:
        places: What becomes of each.
        layers: Returns the number in the file for each number in the model's names, in order; only asked where names have one.
        optional: Whether a model may lack all of them.
    """

    places: tuple[Place, ...]
    layers: Layers = every_layer
    optional: bool = False


def linear(name: str, *, piece: Pieces = as_stored, ends: Sequence[str] = ("weight", "bias")) -> dict[str, Place]:
    """Return the places of a layer's weight and bias, by the ends of their names."""
    return {end: Place(f"{name}.{end}", piece) for end in ends}


def expand(
    modules: Mapping[str, Mapping[str, Place]], *, layers: Layers = every_layer, optional: bool = False
) -> dict[str, Rows]:
    """Return patterns of tensors by name, from modules and the ends of their tensors' names."""
    return {
        f"{module}.{end}": Rows((place,), layers, optional)
        for module, ends in modules.items()
        for end, place in ends.items()
    }


@dataclass(frozen=True, slots=True)
class Encoder:
    """An image encoder with its projection into the text model's space, as llama.cpp computes it.

    Attributes:
        projector: llama.cpp's name, the value of ``clip.projector_type``.
        classes: Classes of transformers that have it.
        kind: The ``model_type`` of the encoder's settings; several if they compute the same.
        defaults: Defaults that the encoder's class has for settings that ``config.json`` may leave out.
        assumes: Values that the graph assumes for the encoder's settings; a setting may also be missing or null.
        tensors: What becomes of tensors by name, without the beginnings ``model.`` and ``vision_model.``; ``{}`` stands for a number.
        keys: Keys of the metadata beside those that all have, or instead of them, without ``clip.``; None leaves a key out.
        mean: The processor's default for the mean of colours.
        deviation: The processor's default for their deviation.
        unused: Beginnings of the names of tensors that the model itself does not use for images.
        refuses: Returns why a model's settings are not computed; an empty text if they are.
        differs: Returns what llama.cpp computes otherwise for a model; an empty text if nothing that matters.
        borrowed: What becomes of tensors of the text part, by the name that a model of text alone gives them.
        others: Beginnings of the names of tensors of parts for something else than images, which the file leaves out.
    """

    projector: str
    classes: tuple[str, ...]
    kind: tuple[str, ...]
    defaults: Mapping[str, Any]
    tensors: Mapping[str, Rows]
    keys: Mapping[str, Key]
    mean: tuple[float, ...] = HALF
    deviation: tuple[float, ...] = HALF
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    refuses: Callable[[Seen], str] | None = None
    differs: Callable[[Seen], str] | None = None
    borrowed: Mapping[str, Place] = field(default_factory=dict)
    others: tuple[str, ...] = ()


def describe_other(key: str, value: object, expected: str) -> str:
    """Return the sentence for a setting that has another value than the graph assumes."""
    return f"{key} is {quoted(value)}, and llama.cpp computes images with {expected}"


def other_base(seen: Seen, *, base: float = _BASE) -> str:
    """Return why the encoder's rotary embedding is not llama.cpp's; an empty text if it is."""
    parameters = seen.vision.get("rope_parameters") or {}
    settings = {**seen.vision, **(parameters if isinstance(parameters, Mapping) else {})}
    own, kind = settings.get("rope_theta", base), settings.get("rope_type", "axial")
    if own != base:
        return describe_other("rope_theta", own, f"{base:.0f}")
    return "" if kind in ("axial", "default") else describe_other("rope_type", kind, "no scaling")
