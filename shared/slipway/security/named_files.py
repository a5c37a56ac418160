"""What errors say of the files that settings name: their paths, unless somebody typed the secret itself in place of its file's name."""

from __future__ import annotations

import os
from pathlib import Path


def described(path: Path, setting: str) -> str:
    """Return the path of a file, or what names it where the path may be the secret.

    Args:
        path: As it was given.
        setting: What gave it, such as ``token_file``.
    """
    if is_path(path):
        return str(path)
    flag = f"--{setting.replace('_', '-')}"
    return f"what {flag} or SLIPWAY_{setting.upper()} names (not repeated, as it may be the secret itself)"


def is_path(path: Path) -> bool:
    """Return whether this is the path of something: it is there, or at least the folder that the path begins with is."""
    start = path.parts[: 2 if path.is_absolute() else 1]
    # Path's own methods fail on a name as long as a key.
    return os.path.lexists(path) or (len(path.parts) > len(start) and os.path.isdir(Path(*start)))  # noqa: PTH112
