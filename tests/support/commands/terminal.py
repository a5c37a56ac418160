"""Run the real command on a pseudo-terminal of a given width."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

from support.commands.cli import SLIPWAY, environment

WIDTHS = (60, 80, 100)

_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_REDRAWN = re.compile(r"\x1b\[\d*A")
"""Control sequence that moves the cursor up: the text after it overwrites earlier text."""


@dataclass(frozen=True)
class Screen:
    """The output of a command on its terminal.

    Attributes:
        code: Exit code.
        raw: The whole output, with control sequences.
        answer: Standard output if that was a pipe; empty otherwise.
    """

    code: int
    raw: str
    answer: str = ""

    @property
    def lines(self) -> list[str]:
        """Return all lines ever drawn, without styles."""
        text = _STYLE.sub("", self.raw).replace("\r\n", "\n").replace("\r", "\n")
        return [line.rstrip() for line in text.split("\n")]

    @property
    def text(self) -> str:
        """Return all lines ever drawn as one text."""
        return "\n".join(self.lines)

    @property
    def redraws(self) -> int:
        """Return how often text was overwritten."""
        return len(_REDRAWN.findall(self.raw))

    def words(self) -> set[str]:
        """Return the words as on one line."""
        return {word for line in self.lines for word in line.split()}

    def too_wide(self, width: int) -> list[str]:
        """Return the lines that are too wide."""
        return [line for line in self.lines if cell_len(line) > width]


def on_terminal(
    *arguments: str | Path, home: Path, width: int, lines: int = 50, pipe_answer: bool = False, **more: str
) -> Screen:
    """Run the command with standard output and error on a terminal; with ``pipe_answer``, only standard error is one."""
    return _run([SLIPWAY, *map(str, arguments)], home, width=width, lines=lines, pipe_answer=pipe_answer, more=more)


def script_on_terminal(script: str, *arguments: str | Path, home: Path, width: int, **more: str) -> Screen:
    """Run Python code on a terminal, for output that no command shows by itself in a test."""
    return _run(
        [sys.executable, "-c", script, *map(str, arguments)], home, width=width, lines=50, pipe_answer=False, more=more
    )


def _run(
    command: Sequence[str], home: Path, *, width: int, lines: int, pipe_answer: bool, more: dict[str, str]
) -> Screen:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, width, 0, 0))
    surroundings = environment(home, TERM="xterm-256color", **more)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        if name not in more:
            surroundings.pop(name, None)
    try:
        process = subprocess.Popen(
            command,
            env=surroundings,
            stdin=theirs,
            stdout=subprocess.PIPE if pipe_answer else theirs,
            stderr=theirs,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    answer: list[bytes] = []
    reading = threading.Thread(target=lambda: answer.append(process.stdout.read() if process.stdout else b""))
    reading.start()
    try:
        written = _all(ours)
        code = process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reading.join()
        if process.stdout:
            process.stdout.close()
        os.close(ours)
    return Screen(code, written.decode(errors="replace"), answer[0].decode())


def _all(terminal: int) -> bytes:
    """Read all output until the last process of the terminal has closed it."""
    written = b""
    with contextlib.suppress(OSError):  # EIO: no process has it open any more
        while piece := os.read(terminal, 65536):
            written += piece
    return written
