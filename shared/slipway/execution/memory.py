"""Memory of a process and what it started."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

# Below this, what two processes share is not worth asking the kernel to add up, which takes it some milliseconds.
_SHARING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """What a process and its descendants hold, in bytes.

    Attributes:
        resident: All of it that is in memory, mapped files included; what processes share is counted once.
        anonymous: What is no copy of a file, so that it stays until they let go of it.
        peak: The most that was resident at any time, as far as the kernel remembers it.
    """

    resident: int = 0
    anonymous: int = 0
    peak: int = 0


def tree_memory(pid: int) -> TreeMemory:
    """Look now; all zero when it is gone."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return TreeMemory()
    # A process that ends between two lines has nothing in either.
    statuses = [_kibibytes(Path(f"/proc/{process.pid}/status")) for process in processes]
    resident = sum(status.get("VmRSS", 0) for status in statuses)
    if sum(status.get("VmRSS", 0) >= _SHARING_BYTES for status in statuses) > 1:
        resident = sum(_proportional(process.pid, status) for process, status in zip(processes, statuses, strict=True))
    anonymous = sum(status.get("RssAnon", 0) + status.get("RssShmem", 0) for status in statuses)
    peak = max((status.get("VmHWM", 0) for status in statuses), default=0)
    return TreeMemory(resident=resident, anonymous=min(anonymous, resident), peak=max(peak, resident))


def own_peak() -> int:
    """The most memory this process itself ever had resident, in bytes; 0 where the kernel does not say."""
    return _kibibytes(Path("/proc/self/status")).get("VmHWM", 0)


def _proportional(pid: int, status: dict[str, int]) -> int:
    """Resident memory of a process, of what it shares only its part; all of it where the kernel does not tell."""
    return _kibibytes(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", status.get("VmRSS", 0))


def _kibibytes(file: Path) -> dict[str, int]:
    """The lines ``Name:  123 kB`` of a file, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                found[name] = int(rest[:-3]) << 10
    return found
