"""What is particular to each kind of model that takes images: arguments of its encoder, and what its decoder takes beside embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipway_onnx_export.forms.pictures import encoders, grids, patches
from slipway_onnx_export.names import IMAGES

Tensors = dict[str, torch.Tensor]

PIXELS = "pixel_values"
_PATCHES, _HEIGHT, _WIDTH = "patches", "height", "width"
Axes = tuple[str | int | None, ...]


@dataclass(frozen=True, slots=True)
class PictureKind:
    """A kind of models that take images.

    Attributes:
        encode: Returns the features of pictures, (image tokens, width), then those that single layers of the decoder add; from the
            model and the encoder's inputs by name.
        inputs: Axes of each input: the name of one that varies, or None for a size that all pictures have. The names are those of the
            arguments of transformers' class.
        joined: Axis along which the arguments of several pictures are joined; None if the encoder takes one picture at a time.
        thrice: Whether positions are three numbers: time, row and column.
        types: Name of the decoder's input that marks the tokens of a picture with 1, by the model's configuration; empty if it has none.
    """

    encode: Callable[[Any, Tensors], list[torch.Tensor]]
    inputs: Mapping[str, Axes]
    joined: int | None = 0
    thrice: bool = False
    types: Callable[[Any], str] = lambda _config: ""


def kind_of(config: Any) -> PictureKind:
    """Return the kind of a model, from its configuration in transformers.

    Raises:
        KeyError: The type of the model is none of those in ``PICTURE_TYPES``.
    """
    return _KINDS[config.model_type]


def _types_of_gemma4(config: Any) -> str:
    """Return the name where a picture's tokens see each other; smaller models have none."""
    return "mm_token_type_ids" if config.get_text_config().use_bidirectional_attention == "vision" else ""


_SQUARES = {PIXELS: (IMAGES, None, None, None)}
_GRIDS = {PIXELS: (_PATCHES, None), "image_grid_thw": (IMAGES, 3)}
_CUT = PictureKind(encoders.encode_cut_pictures, {PIXELS: (1, IMAGES, None, None, None)}, joined=1)
_QWEN3 = PictureKind(grids.encode_interpolated, _GRIDS, thrice=True)
_KINDS: Mapping[str, PictureKind] = {
    "gemma3": PictureKind(encoders.encode_pooled, _SQUARES, types=lambda _config: "token_type_ids"),
    "gemma4": PictureKind(
        patches.encode_placed,
        {PIXELS: (1, _PATCHES, None), "image_position_ids": (1, _PATCHES, 2)},
        joined=None,
        types=_types_of_gemma4,
    ),
    "idefics3": _CUT,
    "internvl": PictureKind(encoders.encode_pooled, _SQUARES),
    "lfm2_vl": PictureKind(patches.encode_shaped, {PIXELS: (1, _PATCHES, None), "spatial_shapes": (1, 2)}, joined=None),
    "llava": PictureKind(encoders.encode_selected_layers, _SQUARES),
    "mistral3": PictureKind(patches.encode_any_size, {PIXELS: (1, None, _HEIGHT, _WIDTH)}, joined=None),
    "qwen2_5_vl": PictureKind(grids.encode_windows, _GRIDS, thrice=True),
    "qwen2_vl": PictureKind(grids.encode_whole, _GRIDS, thrice=True),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    "smolvlm": _CUT,
}
