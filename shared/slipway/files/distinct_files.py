"""Count files by content on disk: two names of one file take its space once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def distinct_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of files; a file with several names among them is counted once."""
    states = (path.stat() for path in paths)
    return sum({(state.st_dev, state.st_ino): state.st_size for state in states}.values())
