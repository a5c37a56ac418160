"""Run the real command in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.harness.logs_kept import logs_kept

SLIPWAY = str(Path(sys.executable).with_name("slipway"))


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the only JSON document on standard output."""
        return json.loads(self.out)


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a command with its own home."""
    return {**os.environ, "SLIPWAY_HOME": str(home), **more}


def start(arguments: Sequence[str | Path], home: Path, **more: str) -> subprocess.Popen[str]:
    """Start the command; its output can be read as text."""
    return subprocess.Popen(
        [SLIPWAY, *map(str, arguments)],
        env=environment(home, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_here(*arguments: str | Path) -> int:
    """Run the command through its boundary in this process; return the exit code of ``main``."""
    from slipway.cli.app import app
    from slipway.cli.boundary import outcome

    words, hook = [str(argument) for argument in arguments], sys.excepthook
    try:
        with logs_kept():
            return outcome(lambda asked: app(args=words, prog_name="slipway", obj=asked))
    finally:
        sys.excepthook = hook  # typer sets its own


def in_process(capfd: pytest.CaptureFixture[str], *words: str | Path, home: Path, **more: str) -> Done:
    """The command in this process, with what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SLIPWAY_HOME": str(home), **more}.items():
            patch.setenv(name, value)
        code = run_here(*words)
    out, err = capfd.readouterr()
    return Done(code, out, err)


def slipway(*arguments: str | Path, home: Path, timeout: float = 580, **more: str) -> Done:
    """Run the command to its end."""
    process = start(arguments, home, **more)
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return Done(process.returncode, out, err)
