"""Map arrays from files that may come from anywhere."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy.typing as npt
from numpy.lib.format import open_memmap

from slipway.files.regular_file import check_regular

_UNREADABLE = (
    *(ValueError, OverflowError, TypeError, LookupError, AttributeError),
    *(SyntaxError, TokenError, MemoryError, RecursionError),
)
"""What numpy raises for headers: of a size beyond 64 bits, of a flag as a size, of a bracket without its end."""


def map_array(path: Path) -> npt.NDArray[Any]:
    """Map an array into memory; unlike numpy's ``load``, refuse anything but one array.

    Raises:
        ValueError: It is no array, or one of objects.
        OSError: It cannot be read, or is not a regular file.
    """
    check_regular(path)
    try:
        values: npt.NDArray[Any] = open_memmap(path, mode="r")
    except _UNREADABLE as error:
        raise ValueError(f"{path.name} is no array: {error}") from error
    return values
