"""Installed versions of Slipway, and how to run the command of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from support import TINY_STAGES
from support.commands.cli import SLIPWAY, Done

VARIABLE = "SLIPWAY_TEST_PREVIOUS"
"""Names the folder that tests/upgrade/tools/previous.sh has made."""
_DESCRIBE = Path(__file__).with_name("describe.py")


@dataclass(frozen=True)
class Version:
    """A version of Slipway that is installed.

    Attributes:
        name: For the names of tests and logs.
        command: Path of ``slipway``.
        python: The interpreter of its environment.
        path: ``PYTHONPATH`` of its processes.
        tiny_stages: Folder with this version's stages that do almost nothing.
    """

    name: str
    command: str
    python: str
    path: str
    tiny_stages: Path

    def environment(self, home: Path, *, tiny: bool = False, **more: str) -> dict[str, str]:
        """Return the environment of a process of this version; with ``tiny``, its stages do almost nothing."""
        path = os.pathsep.join(filter(None, [str(self.tiny_stages) if tiny else "", self.path]))
        return {**os.environ, "PYTHONPATH": path, "SLIPWAY_HOME": str(home), **more}

    def start(self, *words: str | Path, home: Path, **more: str) -> subprocess.Popen[str]:
        """Start the command; its output can be read as text."""
        return subprocess.Popen(
            [self.command, *map(str, words)],
            env=self.environment(home, **more),
            cwd=home.parent,  # not in the checkout, whose metadata Python would find first
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str | Path, home: Path, timeout: float = 580, **more: str) -> Done:
        """Run the command to its end."""
        process = self.start(*words, home=home, **more)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return Done(process.returncode, out, err)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What ``describe.py`` says of this version."""
        done = subprocess.run(
            [self.python, "-P", str(_DESCRIBE)],
            env={**os.environ, "PYTHONPATH": self.path},
            cwd=_DESCRIBE.parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        facts: Mapping[str, Any] = json.loads(done.stdout)
        return facts


THIS = Version("this", SLIPWAY, sys.executable, os.environ.get("PYTHONPATH", ""), TINY_STAGES)
"""The version under test."""


def previous_version() -> Version | None:
    """Return the earlier version; None if none is given."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    programs = folder / "environment" / "bin"
    return Version(
        folder.name, str(programs / "slipway"), str(programs / "python"), path="", tiny_stages=folder / "tiny_stages"
    )
