"""Read settings of a ``config.json`` that nobody has checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipway.errors import GGUFExportError
from slipway.texts import quoted
from slipway_gguf.architectures.table import Architecture

_LARGEST = 2**31 - 1


def whole(settings: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """Return the first of these settings that is there: a whole number from 1.

    Raises:
        GGUFExportError: ``BASE_MODEL_INVALID``.
    """
    key = next((key for key in keys if settings.get(key) is not None), None)
    value = default if key is None else settings[key]
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST:
        return value
    raise invalid(key or keys[0], value, "a whole number from 1")


def number(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a setting that is a finite number.

    Raises:
        GGUFExportError: ``BASE_MODEL_INVALID``.
    """
    value = optional_number(settings, key)
    if value is None:
        value = default
    if value is None:
        raise invalid(key, value, "a number")
    return value


def optional_number(settings: Mapping[str, Any], key: str) -> float | None:
    """Return a setting that is a finite number; None if it is left out.

    Raises:
        GGUFExportError: ``BASE_MODEL_INVALID``.
    """
    value = settings.get(key)
    if value is None:
        return None
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= _LARGEST
        and math.isfinite(value)
    ):
        return float(value)
    raise invalid(key, value, "a number")


def positive(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a setting that is a finite number above 0.

    Raises:
        GGUFExportError: ``BASE_MODEL_INVALID``.
    """
    value = number(settings, key, default)
    if value > 0 or settings.get(key) is None:
        return value
    raise invalid(key, value, "a number above 0")


def unsupported(key: str, value: object, found: Architecture) -> GGUFExportError:
    """Return the error for a setting that llama.cpp does not compute."""
    return GGUFExportError(
        f"{key} is {quoted(value)} in config.json, which llama.cpp does not compute for {found.classes[0]}",
        reason="FAMILY_UNSUPPORTED",
        remedy="use another format for this model",
        about={"key": key, "architecture": found.name},
    )


def invalid(key: str, value: object, expected: str) -> GGUFExportError:
    """Return the error for a setting that no model can have."""
    return GGUFExportError(
        f"{key} is {quoted(value)} in config.json, and not {expected}",
        reason="BASE_MODEL_INVALID",
        remedy="download or copy the base model again, completely",
        about={"key": key},
    )
