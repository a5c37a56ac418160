"""Decide which levels the settings of an export let calibrate."""

from __future__ import annotations

from slipway.configuration.sections import Sections
from slipway.levels import LEVELS, bits_of

AUTO, WITHOUT_DATA = "auto", "rtn"
_MOST_BITS_OF_AUTO = 4
"""At 8 bits, rounding to the nearest is as good as everything else, and takes seconds."""


def calibrated_levels(configuration: Sections) -> dict[str, int]:
    """Return the bits of each level of an enabled format that is calibrated, by level; none for a method without data."""
    method = configuration.optimization.method
    if method == WITHOUT_DATA:
        return {}
    most = _MOST_BITS_OF_AUTO if method == AUTO else max(each.bits or 0 for each in LEVELS.values())
    asked = _asked(configuration)
    return {level: bits for level in LEVELS if level in asked and (bits := bits_of(level)) and bits <= most}


def reads_text(configuration: Sections) -> bool:
    """Return whether an export reads text to make its levels."""
    return bool(calibrated_levels(configuration)) or needs_text(configuration)


def needs_text(configuration: Sections) -> bool:
    """Return whether it has a level that cannot be made without text."""
    return any(level in LEVELS and LEVELS[level].needs_text for level in _asked(configuration))


def _asked(configuration: Sections) -> set[str]:
    return {level for each, _ in configuration.formats.enabled() for level in configuration.levels(each.name)}
