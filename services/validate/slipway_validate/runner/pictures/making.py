"""Make prompts with a picture for the reference's model: held-out text, a picture of random colours, and text again.

A model that takes sound gets prompts with sound in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipway.files.json_documents import read_object_or_empty
from slipway.machine.absent_parts import AbsentPartError
from slipway.model.model_files import processor_settings
from slipway.proof.numerics import Ints
from slipway.proof.pictures import DEVIATION, MEAN, Picture, arrange, make_picture
from slipway.proof.sights import Colours, Sight
from slipway.proof.sounds import make_sound, takes_known_sound
from slipway.validation.pictures import Sense
from slipway_validate.protocol.pictures import PICTURE_TOKENS

BEFORE, CONTINUED = 4, 8
"""Tokens of text before a picture, and of the reference's own continuation behind the text."""
_LARGE = 64
"""Features from which a picture takes long to see: then half as many are made, with twice the text behind each."""
_BREAK = "[IMG_BREAK]"
"""The token behind each row of a picture but the last, in prompts of Mistral 3."""
_MARKS = ("image_token_id", "video_token_id", "audio_token_id")
"""Settings with tokens that stand for features."""


class NoPicturesError(Exception):
    """The model gets no pictures and no sound; the message says why."""


def make_sights(
    model: Any, folder: Path, windows: Ints, *, count: int, longest: int, sense: Sense = Sense.PICTURES
) -> list[Sight]:
    """Make prompts for a model, without a continuation.

    Args:
        model: transformers' model, without peft's wrapper.
        folder: Its folder, with the settings of its processor.
        windows: Held-out text, (N, T).
        count: Number of prompts; fewer if pictures of this model are large.
        longest: Most tokens of a prompt.
        sense: What the prompts have beside text.

    Raises:
        NoPicturesError: No picture or sound is made for it, or it does not take the one that is.
    """
    colours = read_colours(folder)
    features = _count_features(model, _given(model, sense, seed=0), sense)
    number = max(1, count // 2) if features > _LARGE else count
    behind = min(PICTURE_TOKENS * count // number - CONTINUED, windows.shape[1] - BEFORE)
    sights = []
    for seed in range(number):
        picture, pixels = _given(model, sense, seed=seed), np.zeros((0, 0, 3), np.uint8)
        if sense is Sense.PICTURES:
            picture, pixels = _recolour(model.config, picture, colours, seed=seed)
        inside = _tokens_of(model.config, picture, _count_features(model, picture, sense), folder)
        room = longest - BEFORE - len(inside) - CONTINUED
        if min(room, behind) < 1:
            most = f"the model reads {longest} tokens at most, and a {sense.one} of it takes {len(inside)}"
            raise NoPicturesError(most if behind >= 1 else f"a window of held-out text has {windows.shape[1]} tokens")
        text = windows[seed % len(windows)]
        after = text[BEFORE : BEFORE + min(behind, room)]
        mean, deviation, known = colours
        sights.append(
            Sight(
                tokens=np.concatenate([text[:BEFORE], inside, after]).astype(np.int64),
                begin=BEFORE,
                end=BEFORE + len(inside),
                token=picture.token,
                continued=0,
                arguments=picture.arguments,
                types=picture.types,
                pixels=pixels,
                mean=mean,
                deviation=deviation,
                colours_known=known,
                sense=sense,
            )
        )
    return sights


@torch.no_grad()
def continue_sight(model: Any, sight: Sight) -> Sight:
    """Return the prompt with the tokens by which the model continues it greedily. model: with peft's wrapper, if it has one."""
    ids = torch.from_numpy(sight.tokens)[None]
    given = {name: torch.from_numpy(values) for name, values in sight.arguments.items()}
    if sight.types:
        given[sight.types] = (ids == sight.token).long()
    counts = {"max_new_tokens": CONTINUED, "min_new_tokens": CONTINUED}
    config = model.config
    # A token that stands for a feature would have none behind it.
    marks = {getattr(config, name) for name in _MARKS if isinstance(getattr(config, name, None), int)}
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        suppress_tokens=sorted(marks),
        do_sample=False,
        num_beams=1,
        **given,
        **counts,
    )
    new = written[0, len(sight.tokens) :].numpy()
    return replace(sight, tokens=np.concatenate([sight.tokens, new]), continued=len(new))


def read_colours(folder: Path) -> tuple[Colours, Colours, bool]:
    """Return mean and deviation of each colour by which a model's processor normalizes pixels, and whether its files say so."""
    for settings in processor_settings(folder, "image_processor"):
        if settings.get("do_normalize", True) is False:
            return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), True
        mean, deviation = _colours(settings.get("image_mean")), _colours(settings.get("image_std"))
        if mean is not None and deviation is not None and min(deviation) > 0:
            return mean, deviation, True
    return (MEAN, MEAN, MEAN), (DEVIATION, DEVIATION, DEVIATION), False


def senses_of(config: Any) -> tuple[Sense, ...]:
    """Return what prompts of a model have beside text: sound if a sound is made for it, and pictures unless it takes none of them."""
    hears, sees = takes_known_sound(config), getattr(config, "vision_config", None) is not None
    return (*((Sense.PICTURES,) if sees or not hears else ()), *((Sense.SOUND,) if hears else ()))


def _given(model: Any, sense: Sense, *, seed: int) -> Picture:
    """Return a picture or sound for a model."""
    config = model.config
    if sense is Sense.SOUND:
        try:
            sound = make_sound(config, seed=seed)
        except (AttributeError, TypeError, ValueError, ZeroDivisionError, LookupError) as error:
            raise NoPicturesError(f"its config.json does not say how long a sound is: {error}") from error
        assert sound is not None
        return sound
    if getattr(config, "image_token_id", None) is None:
        raise NoPicturesError("its config.json names no token that stands for an image (image_token_id)")
    try:
        picture = make_picture(config, seed=seed)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, LookupError) as error:
        raise NoPicturesError(f"its config.json does not say how large a picture is: {error}") from error
    if picture is None:
        raise NoPicturesError(f"how a model of the type {config.model_type} takes pictures is not known here")
    return picture


@torch.no_grad()
def _count_features(model: Any, picture: Picture, sense: Sense) -> int:
    """Return how many tokens stand for a picture or sound."""
    if picture.tokens:
        return picture.tokens
    given = {name: torch.from_numpy(values) for name, values in picture.arguments.items()}
    try:
        whole = getattr(model, "model", model)
        make = whole.get_audio_features if sense is Sense.SOUND else whole.get_image_features
        made = make(**given)
        features, heard = made.pooler_output, getattr(made, "attention_mask", None)
        listed = [features] if isinstance(features, torch.Tensor) else list(features)
        count = sum(each.numel() // each.shape[-1] for each in listed) if heard is None else int(heard.sum())
    except AbsentPartError as error:
        raise NoPicturesError(str(error)) from error
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError, ZeroDivisionError) as error:
        raise NoPicturesError(
            f"the model does not take a {sense.one} that is made for its config.json: {error or type(error).__name__}"
        ) from error
    if not count:
        raise NoPicturesError(f"the model makes no features of a {sense.one}")
    return count


def _recolour(
    config: Any, picture: Picture, colours: tuple[Colours, Colours, bool], *, seed: int
) -> tuple[Picture, npt.NDArray[np.uint8]]:
    """Return the picture with pixels that are normalized as the model's own processor does, and these pixels."""
    height, width = _size_of(config, picture)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    mean, deviation, _ = colours
    values: Any = (pixels / 255 - np.array(mean)) / np.array(deviation)
    if "image_position_ids" not in picture.arguments:
        values = values * DEVIATION + MEAN  # what is made of a picture has this mean and deviation taken away
    try:
        arguments = arrange(config, values * 255)
    except KeyError as error:
        raise NoPicturesError(
            f"how a model of the type {config.model_type} takes pictures is not known here"
        ) from error
    return Picture(arguments, picture.token, picture.types), pixels


def _size_of(config: Any, picture: Picture) -> tuple[int, int]:
    """Return height and width of a picture by its arguments."""
    given, side = picture.arguments, getattr(config.vision_config, "patch_size", 1)
    if (grid := given.get("image_grid_thw")) is not None:
        rows, columns = (int(each) for each in grid[0][1:])
    elif (shape := given.get("spatial_shapes")) is not None:
        rows, columns = (int(each) for each in shape[0])
    elif (places := given.get("image_position_ids")) is not None:
        columns, rows = (int(each) + 1 for each in places[0].max(axis=0))
    else:
        height, width = given["pixel_values"].shape[-2:]
        return int(height), int(width)
    return rows * side, columns * side


def _tokens_of(config: Any, picture: Picture, features: int, folder: Path) -> Ints:
    """Return the tokens that stand for a picture: one for each feature, and with Mistral 3 one behind each row but the last."""
    between = _added_token(folder, _BREAK) if config.model_type == "mistral3" else None
    if between is None:
        return np.full(features, picture.token, dtype=np.int64)
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    columns = max(1, _size_of(config, picture)[1] // side)
    rows = [[picture.token] * columns] * (features // columns)
    joined = chain.from_iterable(chain.from_iterable(zip(rows, repeat([between]), strict=False)))
    return np.array(list(joined)[:-1], dtype=np.int64)


def _added_token(folder: Path, text: str) -> int | None:
    """Return the number of a tokenizer's added token; None if it has none."""
    listed = read_object_or_empty(folder / "tokenizer.json").get("added_tokens")
    numbers = (each.get("id") for each in listed or () if isinstance(each, dict) and each.get("content") == text)
    return next((number for number in numbers if isinstance(number, int)), None)


def _colours(value: Any) -> Colours | None:
    listed = [value] * 3 if isinstance(value, int | float) else value
    if not isinstance(listed, list) or len(listed) != 3:
        return None
    if not all(isinstance(each, int | float) and abs(each) < 1e6 for each in listed):
        return None
    first, second, third = map(float, listed)
    return first, second, third
