"""Set a variable of the environment for a while: some libraries have no other setting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process within a block, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
