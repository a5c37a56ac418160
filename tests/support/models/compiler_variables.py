"""What peft's BOFT leaves behind in the process that uses it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_COMPILERS = ("CC", "CXX")


@contextmanager
def compiler_kept() -> Iterator[None]:
    """Put back what peft's BOFT sets to look for a CUDA compiler: two variables and a folder on the path."""
    path, before = list(sys.path), {name: os.environ.pop(name, None) for name in _COMPILERS}
    try:
        yield
    finally:
        sys.path[:] = path
        for name in _COMPILERS:
            os.environ.pop(name, None)
        os.environ |= {name: value for name, value in before.items() if value is not None}
