"""The consoles: results go to standard output, everything else to standard error. rich honours ``NO_COLOR``.

All output is cleaned here, because names, labels and messages come from other people and may contain terminal commands.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from slipway.terminal.streams import is_utf8
from slipway.texts import escaped_json, printable, redact

_UNLIMITED = 100_000
"""Columns of a pipe or file, which has no width: nothing is wrapped or dropped there."""


def _width() -> int | None:
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNLIMITED


class CleanConsole(Console):
    """A console that writes only its own control sequences."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything; remove secrets from its texts, and replace terminal commands and invisible characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(redact(segment.text)), segment.style)


# Markup in texts is off too: a folder may be called "[/red]" or ":key:".
errors = CleanConsole(stderr=True, markup=False, emoji=False)
answers = CleanConsole(width=_width(), markup=False, emoji=False)


def show(*parts: RenderableType) -> None:
    """Print a result; a part made by :func:`unbroken_line` may be wider than the terminal."""
    answers.print(Group(*parts), crop=False)


def unbroken_line(label: str, text: str, *, style: str = "bold") -> Text:
    """Return a line that is never wrapped or cut, so that it can be copied: a path, or a command."""
    return Text.assemble((label, style), text, no_wrap=True, overflow="ignore")


def print_json(document: Any) -> None:
    """Print one JSON document, the only thing on standard output."""
    text = json.dumps(document, indent=2, ensure_ascii=not is_utf8(sys.stdout), allow_nan=False)
    sys.stdout.write(escaped_json(redact(text)) + "\n")
    sys.stdout.flush()


def print_answer(document: Any, text: str, *, as_json: bool) -> None:
    """Print the answer of a command as JSON, or else as a text that is never cut."""
    if as_json:
        print_json(document)
    else:
        answers.print(text, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format seconds for people: ``4.2 s``, ``3:05``, ``2:03:05``, and ``5 d`` above two days."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
