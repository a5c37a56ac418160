"""Output that nobody reads any more, as in ``slipway list | head``: the command ends quietly, as other programs do."""

from __future__ import annotations

import os
import select
import sys
import traceback

EXIT_UNREAD = 141
"""What a shell makes of a program that SIGPIPE ended. The signal itself would end Slipway for any connection that breaks."""


def left_unread(error: SystemExit) -> bool:
    """Whether a command ended because what read its output is gone; libraries leave 1 then, without a word."""
    if not isinstance(error.__context__, BrokenPipeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name == "on_broken_pipe" or _is_unread(1) or _is_unread(2)  # rich, or click


def flush(code: int) -> int:
    """Write what is left to write; returns the exit code that a command ends with.

    Args:
        code: Of the command. A failure stays one, also where nobody hears of it.
    """
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except BrokenPipeError:
            code = code or EXIT_UNREAD
        if _is_unread(number):  # Python writes once more at its end, and says that it could not
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
    return code


def _is_unread(descriptor: int) -> bool:
    looked = select.poll()
    looked.register(descriptor, 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in looked.poll(0))
