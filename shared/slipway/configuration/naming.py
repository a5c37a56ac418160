"""Check and fill the patterns that name output directories."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from slipway.settings.sections import wrong_value
from slipway.texts import quoted

_HUB = "hf://"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
PLACEHOLDERS = ("model_name", "timestamp", "checkpoint", "export_id")


def check_pattern(pattern: str) -> None:
    """Check a naming pattern.

    Raises:
        PydanticCustomError: It is not a pattern, or names no folder.
    """
    known = f"placeholders are {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}"
    try:
        parts = list(string.Formatter().parse(pattern))
    except ValueError as error:
        raise wrong_value(pattern, f"is not a pattern: {error}", known) from error
    for literal, name, spec, conversion in parts:
        if "/" in literal or "\\" in literal or "\0" in literal:
            raise wrong_value(pattern, "contains a path separator", "name folders in output.directory")
        if name is not None and (name not in PLACEHOLDERS or spec or conversion):
            raise wrong_value(pattern, f"has an unknown placeholder {quoted('{' + name + '}')}", known)
    if pattern.strip() in {"", ".", ".."}:
        raise wrong_value(pattern, "does not name a folder", "write for example {model_name}_{timestamp}")


def model_name(checkpoint: str, base: str) -> str:
    """Return the name of a model from the settings alone: its training run's folder, or its base's if it has none; empty for neither.

    Args:
        checkpoint: ``checkpoint.path``.
        base: ``base_model.name``.
    """
    parts = re.split(r"[/\\]+", (checkpoint or base).partition("@")[0].rstrip("/\\"))
    return parts[-2] if len(parts) > 1 and parts[-1].startswith("checkpoint-") else parts[-1]


def repository_name(base: str) -> str:
    """Return the repository of ``hf://owner/name@revision``; empty for anything else, as ``owner/name`` may be a folder too."""
    name = base.removeprefix(_HUB).partition("@")[0]
    return name if base.startswith(_HUB) and _REPOSITORY.fullmatch(name) else ""


def render_name(pattern: str, values: Mapping[str, str]) -> str:
    """Return the directory name for a valid pattern; replace characters that are unsafe in a file name by ``-``.

    Args:
        pattern: As checked by :func:`check_pattern`.
        values: One value per placeholder of :data:`PLACEHOLDERS`.
    """
    safe = {name: re.sub(r"[^A-Za-z0-9._+-]+", "-", values[name]).strip("-.") or "model" for name in PLACEHOLDERS}
    return pattern.format(**safe)
