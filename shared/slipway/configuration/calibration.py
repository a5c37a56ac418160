"""Decide which levels the settings of an export let calibrate, at once or if their output fails validation."""

from __future__ import annotations

from slipway.configuration.sections import Sections
from slipway.levels import LEVELS, bits_of

AUTO, WITHOUT_DATA = "auto", "rtn"
_MOST_BITS_OF_AUTO = 4
"""At 8 bits, rounding to the nearest is as good as everything else, and takes seconds."""


def calibrated_levels(configuration: Sections) -> dict[str, int]:
    """Return the bits of each level of an enabled format that is calibrated, by level; none for a method without data."""
    method = configuration.optimization.method
    return {} if method == WITHOUT_DATA else _levels(configuration, method)


def reserve_levels(configuration: Sections) -> dict[str, int]:
    """Return the bits of each level that is calibrated only if an output of it fails validation, by level."""
    optimization, validation = configuration.optimization, configuration.validation
    judged = validation.enabled and validation.compare_outputs and validation.on_failure == "fallback"
    return _levels(configuration, AUTO) if judged and optimization.method == WITHOUT_DATA else {}


def _levels(configuration: Sections, method: str) -> dict[str, int]:
    most = _MOST_BITS_OF_AUTO if method == AUTO else max(each.bits or 0 for each in LEVELS.values())
    asked = {level for each, _ in configuration.formats.enabled() for level in configuration.levels(each.name)}
    return {level: bits for level in LEVELS if level in asked and (bits := bits_of(level)) and bits <= most}
