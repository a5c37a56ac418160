"""Tell local folders from addresses of buckets and servers, which are possible file names too, and expand ``~`` and ``~name``."""

from __future__ import annotations

import re
from pathlib import Path

from slipway.errors import ConfigurationError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path keeps only one of the two slashes


def is_address(text: str | Path) -> bool:
    """Return whether a text is an address such as ``s3://bucket/prefix`` or ``file:///folder``."""
    return _ADDRESS.match(str(text)) is not None


def check_local(folder: str | Path, *, named_by: str) -> None:
    """Refuse an address where a local folder is needed.

    Args:
        folder: The given value.
        named_by: Setting, variable or argument that gave it.

    Raises:
        ConfigurationError: It is an address.
    """
    if is_address(folder):
        raise ConfigurationError(
            f"{named_by} is {str(folder)!r}, which is not a folder of this machine",
            remedy="name a local folder",
            about={"key": named_by},
        )


def user_path(path: str | Path) -> Path:
    """Return a path with ``~`` replaced; unchanged, as in a shell, if there is no such account."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # no such account; a NUL or half of a surrogate pair in its name
        return Path(path)


def has_unknown_home(path: str | Path) -> bool:
    """Return whether a path begins with the home of an unknown account."""
    return str(user_path(path)).startswith("~")
