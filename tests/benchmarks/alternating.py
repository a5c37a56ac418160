"""Run rounds of several processes in turn, so that what is compared meets the same machine and none computes while another is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Figures = dict[str, float]


def alternate(commands: Mapping[str, Sequence[str | Path]], *, rounds: int) -> dict[str, list[Figures]]:
    """Return the figures of each round of each command; a first round of each, which warms up, does not count.

    A command runs :func:`answer`. One that ends before its rounds are done is left out; what it said is on standard error.
    """
    running = {
        name: subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    found: dict[str, list[Figures]] = {name: [] for name in running}
    try:
        for number in range(rounds + 1):
            for name in list(found):
                line = _ask(running[name])
                if not line:
                    print(f"{name} cannot be run", file=sys.stderr)
                    del found[name]
                elif number:
                    found[name].append(json.loads(line))
    finally:
        for process in running.values():
            process.communicate()
    return found


def _ask(process: subprocess.Popen[str]) -> str:
    """Let a process run a round; return its line, which is empty if it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def answer(load: Callable[[], Callable[[], Figures]]) -> None:
    """Load something, and run a round of it for each line of standard input. What libraries print goes to standard error."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = load()
    for _ in sys.stdin:
        print(json.dumps(run()), file=said, flush=True)
