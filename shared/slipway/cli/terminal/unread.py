"""End quietly if the reader of the output is gone, as in ``slipway list | head``."""

from __future__ import annotations

import os
import select
import sys
import traceback

EXIT_UNREAD = 141
"""A shell's exit code for a program that SIGPIPE ended. The signal itself stays off, because any broken connection would end Slipway."""


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
        except BrokenPipeError:
            code = code or EXIT_UNREAD
        if _is_unread(number):  # Python flushes again at its exit, and would report the failure
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
    return code


def _is_unread(descriptor: int) -> bool:
    looked = select.poll()
    looked.register(descriptor, 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in looked.poll(0))
