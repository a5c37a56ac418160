"""Output on every terminal: what it cannot show is replaced, and nothing fails.

Terminals without UTF-8 get ASCII characters instead. Names of files that are no UTF-8 can be shown by none, and are written with
backslashes, which is JSON too.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import MutableMapping
from typing import Any

from slipway.texts import number_of

_ASCII = str.maketrans("✔✘●○■·–—→≤≥…×µ•‘’“”", "+x*o#.--><>.xu*''\"\"")
"""What is written instead where the terminal's encoding lacks a character; one for one, so that tables stay aligned."""


_SIZES = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
_MOST_COLUMNS = 100_000


def write_any_encoding() -> None:
    """Replace what a terminal cannot show, instead of failing on it."""
    codecs.register_error("slipway.ascii", _replace)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace" if is_utf8(stream) else "slipway.ascii")


def forget_odd_sizes(environment: MutableMapping[str, str]) -> None:
    """Remove variables about a terminal's size that are no size, such as ``²``: the libraries that read them fail on them.

    Args:
        environment: That of the process.
    """
    for name in _SIZES:
        if not number_of(environment.get(name, "1"), most=_MOST_COLUMNS):
            del environment[name]


def is_utf8(stream: Any) -> bool:
    """Whether a stream takes every character."""
    return str(getattr(stream, "encoding", "") or "utf-8").lower().replace("-", "").startswith("utf")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "replace").decode("ascii"), error.end
