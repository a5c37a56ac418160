"""Limits of this process's control group, above all in a container; control groups of versions 1 and 2.

A limit may be set on the group itself or on any group around it, so all visible groups are checked. A container usually sees only
its own group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes the largest page-aligned number where there is no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group whose memory is limited.

    Attributes:
        folder: Its folder in the control group file system.
        limit_bytes: Memory limit of all its processes together; the kernel kills one that exceeds it.
    """

    folder: Path
    limit_bytes: int

    def used_bytes(self) -> int:
        """Return the used bytes that cannot be reclaimed: without file pages, which the kernel drops first."""
        now = _number(self.folder / "memory.current") or _number(self.folder / "memory.usage_in_bytes") or 0
        counts = _counts(self.folder / "memory.stat")
        prefix = "total_" if "total_inactive_file" in counts else ""
        files = counts.get(f"{prefix}inactive_file", 0) + counts.get(f"{prefix}active_file", 0)
        return max(now - files, 0)


class ControlGroup:
    """The group of this process.

    Args:
        root: Mount point of control groups.
        membership: The file that lists this process's groups.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._root = root
        self._paths = _memberships(membership)

    def memory(self) -> MemoryGroup | None:
        """Return the group around this process with the lowest memory limit; None without a limit."""
        groups = []
        for folder in self._folders("memory"):
            limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
            if limit is not None and limit < _NO_LIMIT:
                groups.append(MemoryGroup(folder, limit))
        return min(groups, key=lambda group: group.limit_bytes, default=None)

    def cores(self) -> float | None:
        """Return the CPU quota in cores; None without a limit."""
        quotas = [quota for folder in self._folders("cpu") if (quota := _cpu_quota(folder)) is not None]
        return min(quotas, default=None)

    def memory_kills(self) -> int | None:
        """Return how many processes the kernel has killed for memory in the innermost group that counts them; None if none does."""
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):
                kills = _counts(folder / name).get("oom_kill")
                if kills is not None:
                    return kills
        return None

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the group and those around it, innermost first."""
        for name, base in ((controller, self._root / controller), ("", self._root)):
            path = self._paths.get(name)
            if path is None:
                continue
            # Without a cgroup namespace, a container sees its path on the host, but only its own group is mounted.
            folder = base / path.lstrip("/")
            folder = folder if folder.is_dir() else base
            while folder.is_relative_to(base):
                yield folder
                folder = folder.parent


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of the whole machine; ``available_bytes`` can be had without swapping."""

    total_bytes: int
    available_bytes: int


def machine_memory() -> MachineMemory:
    """Read the machine's memory from the kernel, whatever a control group allows of it."""
    counts = {name: value.split() for name, _, value in (line.partition(":") for line in _lines(Path("/proc/meminfo")))}
    total, available = (1024 * int(counts[name][0]) for name in ("MemTotal", "MemAvailable"))
    return MachineMemory(total, available)


def available_memory(group: MemoryGroup | None) -> int:
    """Return the available memory in bytes: that of the machine, at most what is left of the group's limit."""
    machine = machine_memory().available_bytes
    return machine if group is None else max(min(machine, group.limit_bytes - group.used_bytes()), 0)


def usable_cores(group: ControlGroup | None = None) -> int:
    """Return the usable cores by affinity mask and the group's quota, which is rounded up."""
    cores, quota = len(os.sched_getaffinity(0)), (group or ControlGroup()).cores()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _memberships(file: Path) -> dict[str, str]:
    """Return the path of this process's group by controller; version 2 has the empty name."""
    paths: dict[str, str] = {}
    for line in _lines(file):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _cpu_quota(folder: Path) -> float | None:
    quota, _, period = (_lines(folder / "cpu.max") or [""])[0].partition(" ")
    if not period:
        quota = (_lines(folder / "cpu.cfs_quota_us") or [""])[0]
        period = (_lines(folder / "cpu.cfs_period_us") or [""])[0]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _number(file: Path) -> int | None:
    """Return the number in a file; None if it holds something else or does not exist."""
    text = (_lines(file) or [""])[0]
    return int(text) if text.isdigit() else None


def _counts(file: Path) -> dict[str, int]:
    pairs = (line.partition(" ") for line in _lines(file))
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
