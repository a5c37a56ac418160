"""Check and fill the patterns that name output directories."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from slipway.texts import quoted

PLACEHOLDERS = ("model_name", "timestamp", "checkpoint", "export_id")


def pattern_fault(pattern: str) -> str:
    """Return the fault of a naming pattern; empty if it is valid."""
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    try:
        parts = list(string.Formatter().parse(pattern))
    except ValueError as error:
        return f"{quoted(pattern)} is not a pattern: {error}; placeholders are {known}"
    for literal, name, spec, conversion in parts:
        if "/" in literal or "\\" in literal or "\0" in literal:
            return f"{quoted(pattern)} contains a path separator; name folders in output.directory"
        if name is not None and (name not in PLACEHOLDERS or spec or conversion):
            return f"{quoted(pattern)} has an unknown placeholder {quoted('{' + name + '}')}; placeholders are {known}"
    if pattern.strip() in {"", ".", ".."}:
        return f"{quoted(pattern)} does not name a folder; write for example {{model_name}}_{{timestamp}}"
    return ""


def render_name(pattern: str, values: Mapping[str, str]) -> str:
    """Return the directory name for a valid pattern; replace characters that are unsafe in a file name by ``-``.

    Args:
        pattern: As checked by :func:`pattern_fault`.
        values: One value per placeholder of :data:`PLACEHOLDERS`.
    """
    safe = {name: re.sub(r"[^A-Za-z0-9._+-]+", "-", values[name]).strip("-.") or "model" for name in PLACEHOLDERS}
    return pattern.format(**safe)
