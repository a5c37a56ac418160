"""What the kernel lets this process's control group use, in a container above all; versions 1 and 2 of control groups.

A limit may be set on the group itself or on any group around it, so all of them are looked at, as far as they can be seen: in
a container, usually nothing above its own group is.
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
        folder: Where the kernel shows it.
        limit_bytes: What its processes may use in all; the kernel ends one that needs more.
    """

    folder: Path
    limit_bytes: int

    def used_bytes(self) -> int:
        """What is used and cannot be given back: all but pages of files, which the kernel drops first."""
        now = _number(self.folder / "memory.current") or _number(self.folder / "memory.usage_in_bytes") or 0
        counts = _counts(self.folder / "memory.stat")
        prefix = "total_" if "total_inactive_file" in counts else ""
        files = counts.get(f"{prefix}inactive_file", 0) + counts.get(f"{prefix}active_file", 0)
        return max(now - files, 0)


class ControlGroup:
    """The group of this process.

    Args:
        root: Where control groups are mounted.
        membership: The file that says which groups this process is in.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._root = root
        self._paths = _memberships(membership)

    def memory(self) -> MemoryGroup | None:
        """The group around this process with the least memory; None without a limit."""
        found = []
        for folder in self._folders("memory"):
            limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
            if limit is not None and limit < _NO_LIMIT:
                found.append(MemoryGroup(folder, limit))
        return min(found, key=lambda group: group.limit_bytes, default=None)

    def cores(self) -> float | None:
        """How many processors' time this process may use; None without a limit."""
        found = [quota for folder in self._folders("cpu") if (quota := _cpu_quota(folder)) is not None]
        return min(found, default=None)

    def memory_kills(self) -> int | None:
        """Processes the kernel has ended for memory in the innermost group that counts them; None where none does."""
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):
                kills = _counts(folder / name).get("oom_kill")
                if kills is not None:
                    return kills
        return None

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group and those around it, innermost first."""
        for name, base in ((controller, self._root / controller), ("", self._root)):
            path = self._paths.get(name)
            if path is None:
                continue
            # Without a view of its own, a container sees its path on the host, but mounted is only its own group.
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
    """Memory in bytes that can be had now: what the machine has, and no more than what is left of a group's."""
    machine = machine_memory().available_bytes
    return machine if group is None else max(min(machine, group.limit_bytes - group.used_bytes()), 0)


def usable_cores(group: ControlGroup | None = None) -> int:
    """Cores that may be used at the same time, by the affinity mask and the group's quota; of a fraction of one, all of it."""
    cores, quota = len(os.sched_getaffinity(0)), (group or ControlGroup()).cores()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _memberships(file: Path) -> dict[str, str]:
    """Path of the group by controller; by an empty name for version 2."""
    found: dict[str, str] = {}
    for line in _lines(file):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _cpu_quota(folder: Path) -> float | None:
    quota, _, period = (_lines(folder / "cpu.max") or [""])[0].partition(" ")
    if not period:
        quota = (_lines(folder / "cpu.cfs_quota_us") or [""])[0]
        period = (_lines(folder / "cpu.cfs_period_us") or [""])[0]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _number(file: Path) -> int | None:
    """The number in a file; None when there is another word in it, or no such file."""
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
