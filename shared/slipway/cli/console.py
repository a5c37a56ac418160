"""Where output goes: answers to standard output, everything else to standard error. ``NO_COLOR`` is honoured by rich."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from slipway.cli.encoding import is_utf8
from slipway.logs import printable

_UNLIMITED = 100_000
"""Columns of a pipe or file, which has no width: nothing wraps there, and nothing is dropped."""


def _width() -> int | None:
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNLIMITED


errors = Console(stderr=True)
answers = Console(width=_width())


def show(*parts: RenderableType) -> None:
    """Print an answer; a part made by :func:`unbroken` may run over the edge."""
    answers.print(Group(*parts), crop=False)


def unbroken(label: str, text: str, *, style: str = "bold") -> Text:
    """A line that stays whole however long it is, because it is there to be copied: a path, or a command."""
    return Text.assemble((label, style), printable(text), no_wrap=True, overflow="ignore")


def print_json(document: Any) -> None:
    """Print one JSON document, the only thing on standard output."""
    from slipway.logs import redact

    text = json.dumps(document, indent=2, ensure_ascii=not is_utf8(sys.stdout), allow_nan=False)
    sys.stdout.write(redact(text) + "\n")
    sys.stdout.flush()


def size(count: float) -> str:
    """Bytes for people: ``1.4 GB`` (powers of 1000, as disks and downloads are labelled)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for people: ``4.2 s``, ``3:05``, ``2:03:05``; ``5 d`` for what is longer than two days."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
