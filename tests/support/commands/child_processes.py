"""Find running processes that a test started, directly or through others."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MARK = "STARTED_BY_TESTS_OF_PROCESS"
_FOR_STAGES = (_MARK, "PYTEST_CURRENT_TEST", "SLIPWAY_TEST_STAGES", "SLIPWAY_TEST_SECONDS")
_TICKS = os.sysconf("SC_CLK_TCK")
_PERMANENT = {"multiprocessing.resource_tracker": "Python's own, one for each process"}
"""Words in command lines of processes that run as long as their parent, with the reason."""


owned: set[int] = set()
"""Processes that a harness restarted during a test and that its wider fixture will end."""


def mark() -> None:
    """Let every process started from now on inherit a mark, which finds it even after its parent's end.

    Stages inherit it too: they get only named variables, and the mark is one that tests use for their stages.
    """
    os.environ[_MARK] = str(os.getpid())
    os.environ["SLIPWAY_STAGE_ENVIRONMENT"] = ",".join(_FOR_STAGES)


@dataclass(frozen=True)
class Children:
    """The children of this process at one moment."""

    alive: frozenset[int]
    used: object  # changes with every child that ended and was waited for
    moment: int  # in ticks since the machine was started

    @classmethod
    def now(cls) -> Children:
        """Find the children; takes microseconds if there are none."""
        subprocess._cleanup()  # type: ignore[attr-defined] # waits for those whose Popen is gone
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(_alive(), used, int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS))

    def left_since(self, test: str, *, patience: float) -> list[str]:
        """Describe the processes that the test started and that do not end within the patience, in seconds."""
        now = Children.now()
        if (now.alive, now.used) == (self.alive, self.used):
            return []
        deadline = time.monotonic() + patience
        while (left := list(self._left(test))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [f"process {_described(pid)}" for pid in left]

    def _left(self, test: str) -> Iterator[int]:
        running = dict(_running())
        own = os.getpid()
        direct = Children.now().alive - self.alive
        for pid, (parent, started) in running.items():
            if started < self.moment or pid in self.alive or pid in owned:
                continue  # a list of children can lack one while another ends
            if pid in direct:
                yield from () if _is_permanent(pid) else (pid,)
            elif _started_by(pid, own, test):
                ancestor = parent
                while ancestor not in owned and ancestor in running and running[ancestor][1] >= self.moment:
                    ancestor = running[ancestor][0]
                if (
                    ancestor not in self.alive and ancestor not in owned
                ):  # such as the server of a fixture, which may start processes at any time
                    yield pid


def _alive() -> frozenset[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    try:
        listed = b" ".join(Path(f"/proc/self/task/{thread}/children").read_bytes() for thread in _threads())
    except FileNotFoundError:  # a kernel without this list, or a thread that has just ended
        own = os.getpid()
        return frozenset(pid for pid, (parent, _) in _running() if parent == own)
    return frozenset(map(int, listed.split()))


def _threads() -> list[str]:
    return os.listdir("/proc/self/task")  # noqa: PTH208 - as below


def _running() -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield parent and start time of every process on this machine, by id."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - twice as fast as with paths
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            yield int(name), (int(fields[1]), int(fields[19]))


def _started_by(pid: int, process: int, test: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    started_in = (f"PYTEST_CURRENT_TEST={test} ({phase})".encode() for phase in ("setup", "call", "teardown"))
    return f"{_MARK}={process}".encode() in environment and any(mark in environment for mark in started_in)


def _is_permanent(pid: int) -> bool:
    return any(word in _command(pid) for word in _PERMANENT)


def _described(pid: int) -> str:
    return f"{pid}: {_command(pid)[:200] or 'it has ended, but nobody waited for it'}"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
