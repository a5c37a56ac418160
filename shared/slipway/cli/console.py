"""Where output goes: answers to standard output, everything else to standard error. ``NO_COLOR`` is honoured by rich."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

errors = Console(stderr=True)
answers = Console(width=None if sys.stdout.isatty() else 160)  # a pipe has no width; rich would take 80


def print_json(document: Any) -> None:
    """Print one JSON document, the only thing on standard output."""
    from slipway.logs import redact

    sys.stdout.write(redact(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)) + "\n")
    sys.stdout.flush()


def size(count: float) -> str:
    """Bytes for people: ``1.4 GB`` (powers of 1000, as disks and downloads are labelled)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for people: ``4.2 s``, ``3:05``, ``2:03:05``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
