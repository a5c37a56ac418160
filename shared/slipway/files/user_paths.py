"""Paths as people type them: ``~`` and ``~name`` stand for a home folder."""

from __future__ import annotations

from pathlib import Path


def user_path(path: str | Path) -> Path:
    """Return a path with ``~`` replaced; unchanged, as in a shell, if there is no such account."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # no such account; a NUL or half of a surrogate pair in its name
        return Path(path)


def has_unknown_home(path: str | Path) -> bool:
    """Return whether a path begins with the home of an unknown account."""
    return str(user_path(path)).startswith("~")
