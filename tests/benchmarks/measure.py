"""Measuring whole processes: wall time and the peak of their anonymous memory, sampled, children included."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Measured:
    """One finished process.

    Attributes:
        seconds: Wall time.
        peak_anonymous_bytes: Peak of anonymous memory, children included.
        core_seconds: Time that cores worked for it and its children, which other processes change less than the wall time.
    """

    seconds: float
    peak_anonymous_bytes: int
    core_seconds: float = 0.0


def measure(
    command: Sequence[str | Path], *, environment: dict[str, str] | None = None, accepted: Sequence[int] = (0,)
) -> Measured:
    """Run a command to its end and measure it; ``accepted`` are the exit codes of a success.

    Anonymous memory is what a process cannot give back: pages of mapped files are left out.

    Raises:
        RuntimeError: The command failed; its last words are in the message.
    """
    begin, before = time.perf_counter(), _core_seconds()
    with tempfile.TemporaryFile() as errors:  # a pipe that nobody reads would stop a process that says much
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **(environment or {})},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - begin
        if process.returncode not in accepted:
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {said[-2000:]}")
    return Measured(seconds, peak, _core_seconds() - before)


def _core_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _anonymous_bytes(pid: int) -> int:
    """Of a process and all below it, found without looking at any other: that would take a good part of a core."""
    total, found = 0, [pid]
    while found:
        process = Path("/proc") / str(found.pop())
        with contextlib.suppress(OSError):  # it may have ended
            for thread in process.glob("task/*/children"):
                found += [int(child) for child in thread.read_text().split()]
            status = (process / "status").read_text()
            total += sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))
    return total
