"""Write to any terminal without failing: replace characters that it cannot show.

Terminals without UTF-8 get ASCII characters instead. No terminal can show file names that are not UTF-8; they are written with
backslashes, which is valid JSON too.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import MutableMapping
from typing import Any

from slipway.texts import number_of

_ASCII = str.maketrans("✔✘●○■·–—→≤≥…×µ•‘’“”", "+x*o#.--><>.xu*''\"\"")
"""Replacements for characters that the terminal's encoding lacks; one for one, so that tables stay aligned."""


_SIZES = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
_MOST_COLUMNS = 100_000


def write_any_encoding() -> None:
    """Make standard output and error replace characters that they cannot encode, instead of failing."""
    codecs.register_error("slipway.ascii", _replace)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if is_utf8(stream) else "slipway.ascii")


def drop_invalid_sizes(environment: MutableMapping[str, str]) -> None:
    """Remove variables with an invalid size of the terminal, such as ``²``, because libraries fail on them.

    Args:
        environment: Environment of the process.
    """
    for name in _SIZES:
        if not number_of(environment.get(name, "1"), most=_MOST_COLUMNS):
            del environment[name]


def is_utf8(stream: Any) -> bool:
    """Return whether a stream can encode every character."""
    return str(getattr(stream, "encoding", "") or "utf-8").lower().replace("-", "").startswith("utf")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "replace").decode("ascii"), error.end
