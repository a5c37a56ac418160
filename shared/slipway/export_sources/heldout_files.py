"""Find the files of the held-out text that the user names."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import ConfigurationError
from slipway.export_sources.calibration_files import MOST_BYTES
from slipway.sizes import format_size

_KEY = "validation.heldout"


def check_heldout(folder: Path) -> Path:
    """Return the folder that a setting names.

    Raises:
        ConfigurationError: It has no text, or far more than is read of it.
    """
    files = heldout_files(folder) if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files if file.is_file())
    if not files:
        fault, remedy = (
            "is not a folder with .txt files",
            "name such a folder, or leave the setting out to use the built-in text",
        )
    elif size > MOST_BYTES:  # all of it would be read to store it
        fault = f"has {format_size(size)}, and {format_size(MOST_BYTES)} are allowed"
        remedy = "name a folder with a part of it: no more than its first 4 million characters are used"
    else:
        return folder
    raise ConfigurationError(f"{_KEY}: {folder} {fault}", remedy=remedy, about={"key": _KEY})


def heldout_files(folder: Path) -> list[Path]:
    """Return the files of text in a folder, sorted."""
    return sorted(folder.rglob("*.txt"))
