"""Work without a reader: end quietly if it is gone, as in ``slipway list | head``; write to nowhere if there never was one."""

from __future__ import annotations

import os
import select
import sys
import traceback

EXIT_UNREAD = 141
"""A shell's exit code for a program that SIGPIPE ended. The signal itself stays off, because any broken connection would end Slipway."""

_EXIT_UNWRITTEN = 5
"""Exit code of a command whose answer did not fit onto the disk."""


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
    if nowhere != number:  # of a closed stream, it may be the same
        os.dup2(nowhere, number)
        os.close(nowhere)


def _is_unread(descriptor: int) -> bool:
    looked = select.poll()
    looked.register(descriptor, 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in looked.poll(0))
