"""Read single values of a ``config.json``, with an error that names the setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.errors import ModelExportError
from slipway.texts import quoted

LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """Readers of single values; each raises ``BASE_MODEL_INVALID`` for a value that no model can have.

    Attributes:
        error: Class of the error.
    """

    error: type[ModelExportError]

    def whole(self, settings: Mapping[str, Any], *keys: str, default: int | None = None, most: int = LARGEST) -> int:
        """Return the first of these settings that is there: a whole number from 1."""
        key = next((key for key in keys if settings.get(key) is not None), None)
        value = default if key is None else settings[key]
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        raise self.invalid(key or keys[0], value, f"a whole number from 1 to {most}")

    def optional_number(self, settings: Mapping[str, Any], key: str) -> float | None:
        """Return a setting that is a finite number; None if it is left out."""
        value = settings.get(key)
        if value is None:
            return None
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= LARGEST
            and math.isfinite(value)
        ):
            return float(value)
        raise self.invalid(key, value, "a number")

    def number(self, settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
        """Return a setting that is a finite number."""
        value = self.optional_number(settings, key)
        value = default if value is None else value
        if value is None:
            raise self.invalid(key, value, "a number")
        return value

    def positive(self, settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
        """Return a setting that is a finite number above 0."""
        value = self.number(settings, key, default)
        if value > 0 or settings.get(key) is None:
            return value
        raise self.invalid(key, value, "a number above 0")

    def flag(self, settings: Mapping[str, Any], key: str) -> bool:
        """Return a setting that is true or false; false if it is left out."""
        value = settings.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.invalid(key, value, "true or false")

    def invalid(self, key: str, value: object, expected: str) -> ModelExportError:
        """Return the error for a setting that no model can have."""
        return self.error(
            f"{key} is {quoted(value)} in config.json, and not {expected}",
            reason="BASE_MODEL_INVALID",
            remedy="correct config.json, or download the base model again, completely",
            about={"key": key},
        )
