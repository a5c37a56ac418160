"""Commands that start Python without importing from the current folder, which may be a checkpoint with code."""

from __future__ import annotations

import sys
from pathlib import Path


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python; its import path lacks the current folder."""
    return _python("-P", "-m", module, *arguments)


def python_script(path: Path) -> list[str]:
    """Return the command that runs a script with this Python and only its standard library, ignoring the environment."""
    return _python("-I", "-S", str(path))


def _python(*words: str) -> list[str]:
    return [sys.executable, *words]
