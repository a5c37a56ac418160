"""Read settings of a ``config.json`` that nobody has checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipway.errors import TensorRTLLMExportError
from slipway.texts import quoted

_LARGEST = 2**31 - 1


def whole(settings: Mapping[str, Any], *keys: str, default: int | None = None, most: int = _LARGEST) -> int:
    """Return the first of these settings that is there: a whole number from 1.

    Raises:
        TensorRTLLMExportError: ``BASE_MODEL_INVALID``.
    """
    key = next((key for key in keys if settings.get(key) is not None), None)
    value = default if key is None else settings[key]
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
        return value
    raise invalid(key or keys[0], value, f"a whole number from 1 to {most}")


def number(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a setting that is a finite number above 0.

    Raises:
        TensorRTLLMExportError: ``BASE_MODEL_INVALID``.
    """
    value = default if settings.get(key) is None else settings[key]
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= _LARGEST
        and math.isfinite(value)
    ):
        return float(value)
    raise invalid(key, value, "a number above 0")


def flag(settings: Mapping[str, Any], key: str) -> bool:
    """Return a setting that is true or false; false if it is left out.

    Raises:
        TensorRTLLMExportError: ``BASE_MODEL_INVALID``.
    """
    value = settings.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(key, value, "true or false")


def invalid(key: str, value: object, expected: str) -> TensorRTLLMExportError:
    """Return the error for a setting that no model can have."""
    return TensorRTLLMExportError(
        f"{key} is {quoted(value)} in config.json, and must be {expected}",
        reason="BASE_MODEL_INVALID",
        remedy="correct config.json, or download the base model again",
        about={"key": key},
    )


def unsupported(what: str, *, key: str = "") -> TensorRTLLMExportError:
    """Return the error for a model that TensorRT-LLM would compute wrong."""
    return TensorRTLLMExportError(
        what,
        reason="FAMILY_UNSUPPORTED",
        remedy="leave the format out: current releases of TensorRT-LLM load the pytorch folder",
        about={"key": key} if key else {},
    )
