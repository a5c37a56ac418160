"""Describe files named by settings in errors, without showing a secret that was typed in place of its file's name."""

from __future__ import annotations

import os
from pathlib import Path


def described(path: Path, setting: str) -> str:
    """Return the path of a file, or a description of its setting if the path may be the secret.

    Args:
        path: The given path.
        setting: Its setting, such as ``token_file``.
    """
    if is_path(path):
        return str(path)
    flag = f"--{setting.replace('_', '-')}"
    return f"the value of {flag} or SLIPWAY_{setting.upper()} (not shown, because it may be the secret itself)"


def is_path(path: Path) -> bool:
    """Return whether this is a real path: it exists, or at least its first folder does."""
    start = path.parts[: 2 if path.is_absolute() else 1]
    # Methods of Path fail on a name as long as a key.
    return os.path.lexists(path) or (len(path.parts) > len(start) and os.path.isdir(Path(*start)))  # noqa: PTH112
