"""Read the settings of a model's image processor: how pixels become numbers. Light."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.model.decoders.values import LARGEST

_PLACES = (("preprocessor_config.json", ""), ("processor_config.json", "image_processor"))
"""Files with these settings, and the part of the file that has them; transformers 5 keeps them within the processor's."""
_SCALE = 1 / 255


def read_processor(folder: Path) -> Mapping[str, Any] | None:
    """Return the settings of the image processor in a model's folder; None if no file has any."""
    for name, part in _PLACES:
        try:
            document = read_json_object(folder / name, lenient=True)
        except (OSError, ValueError):
            continue
        settings = document.get(part) if part else document
        if isinstance(settings, dict):
            return settings
    return None


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
    try:
        document = read_json_object(folder / "tokenizer.json", largest=LARGEST_LIST, lenient=True)
    except (OSError, ValueError):
        return {}
    listed = document.get("added_tokens")
    return {
        each["content"]: each["id"]
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict) and isinstance(each.get("content"), str) and isinstance(each.get("id"), int)
    }
