"""Read the settings of a model's image processor: how pixels become numbers. Light."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.files.json_documents import read_object_or_empty
from slipway.model.decoders.values import LARGEST

_SCALE = 1 / 255


def colours(settings: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...] | None:
    """Return a number for each colour; None if the setting is neither a number nor a list of three."""
    value = settings.get(key)
    if value is None:
        return default
    listed = [value] * len(default) if isinstance(value, int | float) else value
    if not isinstance(listed, list) or len(listed) != len(default):
        return None
    numbers = [
        each
        for each in listed
        if isinstance(each, int | float) and not isinstance(each, bool) and abs(each) <= LARGEST  # NaN is not
    ]
    return tuple(map(float, numbers)) if len(numbers) == len(default) else None


def other_scale(settings: Mapping[str, Any]) -> str:
    """Return why pixels are scaled otherwise than llama.cpp does, from 0 to 1 and then by colour; an empty text if they are not."""
    factor = settings.get("rescale_factor", _SCALE)
    if settings.get("do_rescale", True) is not True:
        return "do_rescale is off, and llama.cpp divides pixels by 255"
    if not isinstance(factor, float) or not abs(factor - _SCALE) <= 1e-6:
        return f"rescale_factor is {factor!r:.50}, and llama.cpp divides pixels by 255"
    return ""


def added_tokens(folder: Path) -> Mapping[str, int]:
    """Return the numbers of the tokenizer's added tokens by their text; none if its file cannot be read."""
    listed = read_object_or_empty(folder / "tokenizer.json").get("added_tokens")
    return {
        each["content"]: each["id"]
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict) and isinstance(each.get("content"), str) and isinstance(each.get("id"), int)
    }
