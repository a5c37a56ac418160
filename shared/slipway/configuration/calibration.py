"""Decide which levels the settings of an export let calibrate, at once or if their output fails validation."""

from __future__ import annotations

from typing import TypeVar

from slipway.configuration.sections import Sections
from slipway.levels import LEVELS, bits_of

SAMPLE_OF_RUN = "calibration.jsonl"
"""Name of the sample of its training data that a run may bring."""
AUTO, WITHOUT_DATA = "auto", "rtn"
_ENOUGH_BITS = 8
"""From here on, rounding to the nearest is as good as everything else, and takes seconds."""


_T = TypeVar("_T", bound=Sections)


def with_method(configuration: _T, *, has_text: bool) -> _T:
    """Return a configuration whose method is decided: the usual one depends on whether there is text for it."""
    if configuration.optimization.method is not None:
        return configuration
    method = AUTO if has_text else WITHOUT_DATA
    optimization = configuration.optimization.model_copy(update={"method": method})
    return configuration.model_copy(update={"optimization": optimization})


def calibrated_levels(configuration: Sections) -> dict[str, int]:
    """Return the bits of each level of an enabled format that is calibrated, by level; none for a method without data, or while it is open."""
    method = configuration.optimization.method
    return {} if method in (None, WITHOUT_DATA) else _levels(configuration, method)


def reserve_levels(configuration: Sections) -> dict[str, int]:
    """Return the bits of each level that is calibrated only if an output of it fails validation, by level."""
    optimization, validation = configuration.optimization, configuration.validation
    judged = validation.enabled and validation.compare_outputs and validation.on_failure == "fallback"
    return _levels(configuration, AUTO) if judged and optimization.method in (None, WITHOUT_DATA) else {}


def _levels(configuration: Sections, method: str) -> dict[str, int]:
    asked = _requested_levels(configuration)
    levels = {level: bits for level in LEVELS if level in asked and (bits := bits_of(level))}
    return {level: bits for level, bits in levels.items() if method != AUTO or bits < _ENOUGH_BITS}


def reads_text(configuration: Sections) -> bool:
    """Return whether an export reads text to make its levels: they need it, or take the text that the settings name."""
    named = bool(configuration.optimization.calibration)
    taken = named and (
        any(level in LEVELS and LEVELS[level].takes_text for level in _requested_levels(configuration))
        or any(
            level in each.quantization.text_levels
            for each, _ in configuration.formats.enabled()
            for level in configuration.levels(each.name)
        )
    )
    return taken or bool(calibrated_levels(configuration)) or needs_text(configuration)


def may_read_text(configuration: Sections) -> bool:
    """Return whether an export reads text, or does if there is some or an output fails validation."""
    is_open = configuration.optimization.method is None and bool(_levels(configuration, AUTO))
    return is_open or reads_text(configuration) or bool(reserve_levels(configuration))


def needs_text(configuration: Sections) -> bool:
    """Return whether it has a level that cannot be made without text."""
    return any(level in LEVELS and LEVELS[level].needs_text for level in _requested_levels(configuration))


def depends_on_text(configuration: Sections) -> bool:
    """Return whether an export fails without the text for calibration, because a level needs it or the settings name it; otherwise it goes on without."""
    return needs_text(configuration) or (bool(configuration.optimization.calibration) and reads_text(configuration))


def _requested_levels(configuration: Sections) -> set[str]:
    return {level for each, _ in configuration.formats.enabled() for level in configuration.levels(each.name)}
