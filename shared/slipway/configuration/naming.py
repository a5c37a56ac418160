"""Names of output directories: patterns with placeholders."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from slipway.texts import quoted

PLACEHOLDERS = ("model_name", "timestamp", "checkpoint", "export_id")


def pattern_fault(pattern: str) -> str:
    """Why a naming pattern cannot be used; empty when it can."""
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    try:
        parts = list(string.Formatter().parse(pattern))
    except ValueError as error:
        return f"{quoted(pattern)} is not a pattern: {error}; placeholders are {known}"
    for literal, name, spec, conversion in parts:
        if "/" in literal or "\\" in literal or "\0" in literal:
            return f"{quoted(pattern)} contains a path separator; put folders into output.directory"
        if name is not None and (name not in PLACEHOLDERS or spec or conversion):
            return f"{quoted(pattern)} has an unknown placeholder {quoted('{' + name + '}')}; placeholders are {known}"
    if pattern.strip() in {"", ".", ".."}:
        return f"{quoted(pattern)} does not name a folder; for example {{model_name}}_{{timestamp}}"
    return ""


def render_name(pattern: str, values: Mapping[str, str]) -> str:
    """The directory name a valid pattern gives; characters that do not belong in a file name become ``-``.

    Args:
        pattern: As checked by :func:`pattern_fault`.
        values: One value per placeholder of :data:`PLACEHOLDERS`.
    """
    safe = {name: re.sub(r"[^A-Za-z0-9._+-]+", "-", values[name]).strip("-.") or "model" for name in PLACEHOLDERS}
    return pattern.format(**safe)
