"""Write to any terminal or pipe without failing on characters that it cannot show, or on readers that have gone.

Terminals without UTF-8 get ASCII characters instead. No terminal can show file names that are not UTF-8; they are written with
backslashes, which is valid JSON too. A command whose reader is gone ends quietly, as in ``slipway list | head``; one that never
had a reader writes to nowhere.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

from slipway.texts import number_of

_ASCII = str.maketrans("✔✘●○■·–—→≤≥…×µ•‘’“”", "+x*o#.--><>.xu*''\"\"")
"""Replacements for characters that the terminal's encoding lacks; one for one, so that tables stay aligned."""

_SIZES = ("COLUMNS", "LINES", "TERMINAL_WIDTH")
_MOST_COLUMNS = 100_000

EXIT_UNREAD = 141
"""A shell's exit code for a program that SIGPIPE ended. The signal itself stays off, because any broken connection would end Slipway."""

_EXIT_UNWRITTEN = 5
"""Exit code of a command whose answer did not fit onto the disk."""


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


def open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, as in ``slipway list >&-``.

    Otherwise libraries fail on a missing stream, and the next file that is opened would take its place and its output.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def reader_is_gone(error: SystemExit) -> bool:
    """Return whether a command ended because the reader of its output is gone; libraries then exit silently with 1."""
    if not isinstance(error.__context__, BrokenPipeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name == "on_broken_pipe" or _is_unread(1) or _is_unread(2)  # rich, or click


def flush(code: int) -> int:
    """Flush the output; return the final exit code of a command.

    Args:
        code: Exit code so far. A failure keeps its code, even without a reader.
    """
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
            failed = False
        except OSError as error:
            code = code or (EXIT_UNREAD if isinstance(error, BrokenPipeError) else _EXIT_UNWRITTEN)
            failed = True
        if failed or _is_unread(number):  # Python flushes again at its exit, and would report the failure
            _lead_nowhere(number)
    return code


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:  # the number of a closed stream is free, so it may be this one
        os.dup2(nowhere, number)
        os.close(nowhere)


def _is_unread(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
