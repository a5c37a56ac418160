"""Commands that start Python without importing from the current folder, which may be a checkpoint with code."""

from __future__ import annotations

import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python; its import path lacks the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]
