"""Measure the memory of a process and its descendants."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

# Smaller processes share too little to justify reading their proportional set size, which takes the kernel some milliseconds.
_SHARING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Memory of a process and its descendants, in bytes.

    Attributes:
        resident: Resident memory, including mapped files; shared memory is counted once.
        anonymous: Memory that is not a copy of a file, so that only the processes themselves can free it.
        peak: Largest resident memory so far, as far as the kernel has recorded it.
    """

    resident: int = 0
    anonymous: int = 0
    peak: int = 0


def tree_memory(pid: int) -> TreeMemory:
    """Measure a process and its descendants now; all zero if the process is gone."""
    # A process that ends meanwhile counts as zero.
    statuses = {process: _kibibytes(Path(f"/proc/{process}/status")) for process in _tree(pid)}
    resident = sum(status.get("VmRSS", 0) for status in statuses.values())
    if sum(status.get("VmRSS", 0) >= _SHARING_BYTES for status in statuses.values()) > 1:
        resident = sum(_proportional(process, status) for process, status in statuses.items())
    anonymous = sum(status.get("RssAnon", 0) + status.get("RssShmem", 0) for status in statuses.values())
    peak = max((status.get("VmHWM", 0) for status in statuses.values()), default=0)
    return TreeMemory(resident=resident, anonymous=min(anonymous, resident), peak=max(peak, resident))


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants.

    The kernel lists the children of each thread. Without such lists, the parents of all processes of the machine are read, which takes
    longer than all the rest.
    """
    if not Path("/proc/thread-self/children").exists():
        with contextlib.suppress(psutil.Error):
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    processes = [pid]
    for process in processes:  # it grows meanwhile
        with contextlib.suppress(OSError):  # a thread or the process has ended
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                processes += map(int, children.read_text().split())
    return processes


def own_peak() -> int:
    """Return this process's peak resident memory in bytes, without its descendants; 0 if unknown."""
    return _kibibytes(Path("/proc/self/status")).get("VmHWM", 0)


def _proportional(pid: int, status: dict[str, int]) -> int:
    """Return a process's proportional set size, or its resident set size if that is unknown."""
    return _kibibytes(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", status.get("VmRSS", 0))


def _kibibytes(file: Path) -> dict[str, int]:
    """Read the lines ``Name:  123 kB`` of a file, as bytes by name; empty if it cannot be read."""
    sizes = {}
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                sizes[name] = int(rest[:-3]) << 10
    return sizes
