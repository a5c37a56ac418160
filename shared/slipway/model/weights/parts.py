"""Name the parts of a model beside its text: heads that predict further tokens, and what turns images and sound into tokens.

A part is known by the names of its tensors alone. Prefixes differ between releases of a model, so a tensor's *place* begins where its part does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER


class ModelPart(StrEnum):
    """A part of a model beside its text."""

    MULTI_TOKEN_HEAD = "multi-token head"  # noqa: S105 - a part of a model, and no password
    IMAGES_AND_SOUND = "part for images and sound"


@dataclass(frozen=True, slots=True)
class PartTensor:
    """A tensor of a part.

    Attributes:
        name: Its stored name.
        part: The part.
        place: Its name from the part on, without a prefix.
    """

    name: str
    part: ModelPart
    place: str


_HEAD = re.compile(r"(?:^|\.)(?P<place>mtp\..+)")
_LAYER = re.compile(r"(?:^|\.)(?P<place>layers\.(?P<number>\d+)\..+)")
_SENSES = re.compile(
    r"(?:^|\.)(?P<place>(?:visual|vision_tower|vision_model|vision_encoder|audio_tower|audio_model|image_newline"
    r"|multi_modal_projector|embed_vision|embed_audio|connector|aligner)(?:\..+)?)$"
)
"""Names of what turns images and sound into tokens, as transformers' classes give them."""


def number_of_layers(config: ModelConfig) -> int | None:
    """Return the number of a decoder's layers; None for other families, which may number several stacks, or if it is not stated."""
    number = config.text.get("num_hidden_layers") if config.family is DECODER else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


def find_parts(names: Iterable[str], *, layers: int | None) -> list[PartTensor]:
    """Return the tensors of parts beside the text, by name.

    Args:
        names: Stored names of all tensors.
        layers: Layers of the text model. A layer behind the last one predicts a further token (DeepSeek-V3, GLM-4).
    """
    found = (_part_of(name, layers) for name in sorted(names))
    return [each for each in found if each is not None]


def _part_of(name: str, layers: int | None) -> PartTensor | None:
    if senses := _SENSES.search(name):
        return PartTensor(name, ModelPart.IMAGES_AND_SOUND, senses["place"])
    if head := _HEAD.search(name):
        return PartTensor(name, ModelPart.MULTI_TOKEN_HEAD, head["place"])
    layer = _LAYER.search(name)
    if layer and layers is not None and int(layer["number"]) >= layers:
        return PartTensor(name, ModelPart.MULTI_TOKEN_HEAD, layer["place"])
    return None
