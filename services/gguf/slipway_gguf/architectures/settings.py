"""Read settings of a ``config.json`` that nobody has checked."""

from __future__ import annotations

from slipway.errors import GGUFExportError
from slipway.model.config.values import ConfigValues
from slipway.texts import quoted
from slipway_gguf.architectures.table import Architecture

VALUES = ConfigValues(GGUFExportError)
whole, optional_number, positive = VALUES.whole, VALUES.optional_number, VALUES.positive


def unsupported(key: str, value: object, found: Architecture) -> GGUFExportError:
    """Return the error for a setting that llama.cpp does not compute."""
    return GGUFExportError(
        f"{key} is {quoted(value)} in config.json, which llama.cpp does not compute for {found.class_name}",
        reason="FAMILY_UNSUPPORTED",
        remedy="use another format for this model",
        about={"key": key, "architecture": found.name},
    )
