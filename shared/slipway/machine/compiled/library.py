"""Load a service's compiled kernels, and choose those for this processor."""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_NAME = f"_kernel{EXTENSION_SUFFIXES[-1]}"  # the suffix that names no version of Python: setup.py


def load_library(folder: Path) -> ctypes.CDLL | None:
    """Load the library that was compiled into a folder.

    Return None if there is none (no C compiler, or the wheel for any platform), or one that this machine cannot load: a folder may be
    shared by machines of several kinds.
    """
    try:
        library = ctypes.CDLL(str(folder / _NAME))
    except OSError:
        return None
    library.slipway_kernel.restype = ctypes.c_char_p
    return library


def best_kernel(folder: Path) -> tuple[ctypes.CDLL, str] | None:
    """Return the library of a folder and the best instructions of this processor that it has kernels for, such as ``avx512``."""
    library = load_library(folder)
    name: bytes | None = library.slipway_kernel() if library else None
    return (library, name.decode()) if library and name else None
