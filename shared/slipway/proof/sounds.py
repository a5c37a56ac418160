"""Sounds for models that take sound beside text: made here, as the arguments of transformers' class.

They need no processor: a sound is an array of random numbers in the range of a spectrum's logarithms, with some frames of padding behind.
Axes: F = mel bins, frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slipway.proof.pictures import Arguments, Picture
from slipway.proof.sights import LARGEST, MOST_TOKENS

_CHUNKS, _HEARD = 2, 0.7
"""Chunks of a sound, and the share of frames that are no padding: the last chunk is not full."""
_FRAMES = 60
"""Frames of a sound, for an encoder that takes any number."""


def takes_known_sound(config: Any) -> bool:
    """Return whether a model with this configuration in transformers takes sound, in a way that is known here."""
    known = is_known_type(config.model_type) and getattr(config, "audio_token_id", None) is not None
    return known and getattr(config, "audio_config", None) is not None


def is_known_type(model_type: object) -> bool:
    """Return whether a sound can be made for models of this type, as ``config.json`` names it."""
    return isinstance(model_type, str) and model_type in _KINDS


def make_sound(config: Any, *, seed: int) -> Picture | None:
    """Make a sound for a model; None if it takes none, or in a way that is not known here.

    Args:
        config: The model's configuration in transformers.
        seed: Of its frames.

    Raises:
        ValueError: Its configuration asks for a sound larger than a prompt may have.
    """
    if not takes_known_sound(config):
        return None
    arguments = _KINDS[config.model_type](config.audio_config, np.random.default_rng(seed))
    tokens = int(getattr(config, "audio_soft_tokens_per_image", None) or 0)
    if not 0 <= tokens <= MOST_TOKENS:
        raise ValueError(f"a sound of it takes {tokens} tokens")
    return Picture(arguments, int(config.audio_token_id), tokens=tokens)


def _frames_in_chunks(ear: Any, random: np.random.Generator) -> Arguments:
    """Return frames of whole chunks, (1, F, frames), and which of them are no padding, (1, frames)."""
    bins, frames = _within(int(ear.num_mel_bins), _CHUNKS * 2 * int(ear.n_window))
    heard = np.arange(frames) < round(_HEARD * frames)
    values = random.uniform(-1, 1.5, (1, bins, frames)) * heard
    return {"input_features": values.astype(np.float32), "input_features_mask": heard[None].astype(np.int64)}


def _whole_window(ear: Any, random: np.random.Generator) -> Arguments:
    """Return frames of the only length that the encoder takes, (1, F, frames)."""
    shape = _within(int(ear.num_mel_bins), 2 * int(ear.max_source_positions))
    return {"input_features": random.uniform(-1, 1.5, (1, *shape)).astype(np.float32)}


def _frames_in_rows(ear: Any, random: np.random.Generator) -> Arguments:
    """Return a row for each frame, (1, frames, F), and which of them are no padding, (1, frames).

    Gemma 4's encoder makes a feature of four frames, and Gemma 3n's, which names its mel bins, of 16.
    """
    listed = getattr(ear, "input_feat_size", None)
    bins, frames = _within(int(listed or int(ear.subsampling_conv_channels[0]) // 4 * 4), _FRAMES)
    heard = np.arange(frames) < round(_HEARD * frames)
    values = random.uniform(-1, 1.5, (1, frames, bins)) * heard[:, None]
    return {"input_features": values.astype(np.float32), "input_features_mask": heard[None]}


def _within(bins: int, frames: int) -> tuple[int, int]:
    """Return them if a prompt may have a sound of so many, in float32."""
    if bins < 1 or frames < 1 or bins * frames > LARGEST // 4:
        raise ValueError(f"a sound of it has {frames} frames of {bins} mel bins")
    return bins, frames


_KINDS: Mapping[str, Callable[[Any, np.random.Generator], Arguments]] = {
    **dict.fromkeys(("gemma3n", "gemma4"), _frames_in_rows),
    "qwen3_asr": _frames_in_chunks,
    "voxtral": _whole_window,
}
"""By the type of a model. One is here once a test has run it on sound."""
