"""Pictures for models that take images: made here, of a size that no processor would change, as the arguments of transformers' class.

They need no processor and none of its libraries: a picture is an array of random colours, normalized and ordered as the model's own
processor orders it. Axes: H = height, W = width, T = frames of a patch, N = patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
Arguments = dict[str, Array]
Tokens = tuple[int, int]
"""Tokens of a picture down and across."""

MEAN, DEVIATION = 0.5, 0.5
"""Colours are brought from 0 to 1 into -1 to 1, as most processors do."""
FREE_SIZE: Tokens = (4, 6)
"""Tokens of a picture where its size is free: two different numbers, so that exchanged axes show."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, or a sound.

    Attributes:
        arguments: What the model's class takes for it beside tokens, by name: pixels or frames as floats, sizes and masks as integers.
        token: The token that stands for each of its features.
        types: Name of the argument that marks those tokens with 1; empty if the class takes none.
        tokens: Number of those tokens, if the model's class takes one number of them whatever it makes; 0 if the model says how many.
    """

    arguments: Mapping[str, Array]
    token: int
    types: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """How pictures of a kind of model are made.

    Attributes:
        size: Returns height and width of a picture, from transformers' configuration, and its tokens where the size is free.
        arrange: Returns the arguments for pixels of that size.
        types: As in :class:`Picture`.
    """

    size: Callable[[Any, Tokens], tuple[int, int]]
    arrange: Callable[[Any, Pixels], Arguments]
    types: str = ""


def make_picture(config: Any, *, seed: int, tokens: Tokens = FREE_SIZE) -> Picture | None:
    """Make a picture for a model; None if it takes none, or in a way that is not known here.

    Args:
        config: The model's configuration in transformers.
        seed: Of its colours.
        tokens: Its tokens down and across, for a model that takes pictures of any size. One that attends within windows gets a picture
            that is wider than a window.
    """
    kind = _KINDS.get(config.model_type)
    token = getattr(config, "image_token_id", None)
    if kind is None or token is None:
        return None
    pixels = np.random.default_rng(seed).integers(0, 256, (*kind.size(config, tokens), 3), dtype=np.uint8)
    return Picture(kind.arrange(config, pixels), int(token), kind.types)


def arrange(config: Any, pixels: Pixels) -> Arguments:
    """Return the arguments of the model's class for a picture of a size that its processor would not change.

    Raises:
        KeyError: The model takes no pictures, or in a way that is not known here.
    """
    return _KINDS[config.model_type].arrange(config, pixels)


# Sizes.


def _square(config: Any, _: Tokens) -> tuple[int, int]:
    """Return the one size that the encoder takes."""
    size = config.vision_config.image_size
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) else (int(size), int(size))


def _side_of_gemma3n(_config: Any, _: Tokens) -> tuple[int, int]:
    """Return the one size that its processor makes; its configuration does not have it."""
    return 768, 768


def _of_tokens(config: Any, tokens: Tokens, *, merge: str) -> tuple[int, int]:
    """Return a size with so many tokens; the setting `merge` has the patches of a token in either direction."""
    eye = config.vision_config
    side = int(eye.patch_size) * int(getattr(eye, merge, None) or getattr(config, merge))
    # Qwen2.5-VL attends within windows: a picture is wider than one.
    columns = max(tokens[1], int(getattr(eye, "window_size", 0)) // side + 2)
    return tokens[0] * side, columns * side


def _merged(config: Any, tokens: Tokens) -> tuple[int, int]:
    return _of_tokens(config, tokens, merge="spatial_merge_size")


def _downsampled(config: Any, tokens: Tokens) -> tuple[int, int]:
    return _of_tokens(config, tokens, merge="downsample_factor")


def _pooled(config: Any, tokens: Tokens) -> tuple[int, int]:
    return _of_tokens(config, tokens, merge="pooling_kernel_size")


# Arguments.


def _normalized(pixels: Pixels) -> npt.NDArray[np.float32]:
    """(H, W, 3), bytes → (3, H, W), floats."""
    return ((pixels / 255 - MEAN) / DEVIATION).transpose(2, 0, 1).astype(np.float32)


def _whole(_: Any, pixels: Pixels) -> Arguments:
    return {"pixel_values": _normalized(pixels)[None]}


def _with_size(config: Any, pixels: Pixels) -> Arguments:
    return _whole(config, pixels) | {"image_sizes": np.array([pixels.shape[:2]])}


def _whole_and_part(_: Any, pixels: Pixels) -> Arguments:
    """Return a picture, and the only part that it is cut into."""
    return {"pixel_values": np.stack([_normalized(pixels)] * 2)[None]}


def _frames_of_patches(config: Any, pixels: Pixels) -> Arguments:
    """Return patches as Qwen's processor orders them: two equal frames, and the patches of a token beside each other. (N, 3 · T · side²)."""
    eye = config.vision_config
    side, merged, frames = eye.patch_size, eye.spatial_merge_size, eye.temporal_patch_size
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    values = np.stack([_normalized(pixels)] * frames)
    values = values.reshape(frames, 3, rows // merged, merged, side, columns // merged, merged, side)
    values = values.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
    return {"pixel_values": values, "image_grid_thw": np.array([[1, rows, columns]])}


def _patches(config: Any, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a row of values for each patch. (3, H, W) → (1, N, side² · 3)."""
    side = config.vision_config.patch_size
    rows, columns = values.shape[1] // side, values.shape[2] // side
    flat = values.reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
    return flat.reshape(1, rows * columns, -1)


def _patches_with_shape(config: Any, pixels: Pixels) -> Arguments:
    values, side = _patches(config, _normalized(pixels)), config.vision_config.patch_size
    return {
        "pixel_values": values,
        "spatial_shapes": np.array([[pixels.shape[0] // side, pixels.shape[1] // side]]),
        "pixel_attention_mask": np.ones(values.shape[:2], np.int64),
    }


def _patches_with_places(config: Any, pixels: Pixels) -> Arguments:
    """Return patches of colours from 0 to 1, and the column and row of each."""
    side = config.vision_config.patch_size
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    values = (pixels / 255).transpose(2, 0, 1).astype(np.float32)
    places = np.array([[[column, row] for row in range(rows) for column in range(columns)]])
    return {"pixel_values": _patches(config, values), "image_position_ids": places}


_QWEN = _Kind(_merged, _frames_of_patches, types="mm_token_type_ids")
_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("internvl", "llava"), _Kind(_square, _whole)),
    **dict.fromkeys(("smolvlm", "idefics3"), _Kind(_square, _whole_and_part)),
    "gemma3": _Kind(_square, _whole, types="token_type_ids"),
    "gemma3n": _Kind(_side_of_gemma3n, _whole),
    "gemma4": _Kind(_pooled, _patches_with_places, types="mm_token_type_ids"),
    "lfm2_vl": _Kind(_downsampled, _patches_with_shape),
    "mistral3": _Kind(_merged, _with_size),
}
"""By the type of a model. One is here once a test has run it on a picture."""
