"""Measure the memory of a stage's processes, and warn when a stage comes close to a limit.

Limits are the stage's own memory, that of its container or machine, and disk space.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipway.machine.cgroup import ControlGroup, machine_memory
from slipway.observability import metrics
from slipway.sizes import format_size

# Smaller processes share too little to justify reading their proportional set size, which takes the kernel some milliseconds.
_SHARING_BYTES = 64 << 20

MEMORY_SHARE = 0.9
"""Warn at this share of a memory limit. Stages usually need a second or two for the rest, so the warning comes first."""

MACHINE_SHARE = 0.05
"""Warn if only this share of the machine's memory is left. It has no limit per stage, and other programs use it too."""

DISK_SHARE, DISK_BYTES = 0.05, 1 << 30
"""Warn if less space is left than the smaller of these: a share, for small volumes, or the bytes a fast disk writes in a second."""

Warn = Callable[[str], None]


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
    statuses = {process: _kibibytes(Path(f"/proc/{process}/status")) for process in _process_tree(pid)}
    resident = sum(status.get("VmRSS", 0) for status in statuses.values())
    if sum(status.get("VmRSS", 0) >= _SHARING_BYTES for status in statuses.values()) > 1:
        resident = sum(_proportional(process, status) for process, status in statuses.items())
    anonymous = sum(status.get("RssAnon", 0) + status.get("RssShmem", 0) for status in statuses.values())
    peak = max((status.get("VmHWM", 0) for status in statuses.values()), default=0)
    return TreeMemory(resident=resident, anonymous=min(anonymous, resident), peak=max(peak, resident))


def _process_tree(pid: int) -> list[int]:
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


def own_peak_memory() -> int:
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


class Pressure:
    """Warns once about each limit that one attempt comes close to.

    Args:
        stage: Name of the stage.
        workdir: Its work folder.
        max_memory_bytes: Anonymous memory that it should stay below.
        warn: Function that takes the text of a warning.
        group: Its control group; this process's by default.
    """

    def __init__(
        self, stage: str, workdir: Path, *, max_memory_bytes: int, warn: Warn, group: ControlGroup | None = None
    ) -> None:
        self._stage = stage
        self._workdir = workdir
        self._max_memory_bytes = max_memory_bytes
        self._warn = warn
        self._group = (group or ControlGroup()).memory()
        self._said: set[str] = set()

    def check(self, memory: TreeMemory) -> None:
        """Compare the present use with the limits.

        Args:
            memory: Memory of the stage's processes.
        """
        self._check_own_limit(memory)
        self._check_memory_around(memory)
        self._check_disk()

    def _check_own_limit(self, memory: TreeMemory) -> None:
        limit = self._max_memory_bytes
        if memory.anonymous >= limit * MEMORY_SHARE:
            share = f"{100 * memory.anonymous // limit} % of the {format_size(limit)} it should stay below"
            self._say("memory", f"uses {format_size(memory.anonymous)} of memory, {share}")

    def _check_memory_around(self, memory: TreeMemory) -> None:
        group = self._group
        if group is not None:
            used = group.used_bytes()
            if used >= group.limit_bytes * MEMORY_SHARE:
                what = f"{format_size(used)} of the {format_size(group.limit_bytes)} of its container are used"
                self._say(
                    "container_memory",
                    f"may be killed for memory: {what}, {format_size(memory.anonymous)} by the stage itself",
                )
        machine = machine_memory()
        if machine.available_bytes <= machine.total_bytes * MACHINE_SHARE:
            what = (
                f"{format_size(machine.available_bytes)} of the machine's {format_size(machine.total_bytes)} are left"
            )
            self._say(
                "machine_memory", f"may be killed for memory: {what}; it uses {format_size(memory.anonymous)} itself"
            )

    def _check_disk(self) -> None:
        try:
            disk = shutil.disk_usage(self._workdir)
        except OSError:  # the folder was removed at the end of the attempt
            return
        if is_nearly_full(disk.free, total=disk.total):
            what = f"{format_size(disk.free)} of {format_size(disk.total)} are left for its work folder"
            self._say("disk", f"runs out of disk space: {what}; free some, or use a larger disk")

    def _say(self, kind: str, what: str) -> None:
        if kind in self._said:
            return
        self._said.add(kind)
        metrics.PRESSURE.add(stage=self._stage, kind=kind)
        self._warn(f"{self._stage} {what}")


def is_nearly_full(free: int, *, total: int) -> bool:
    """Return whether a file system may be full before the next check; sizes in bytes."""
    return free <= min(total * DISK_SHARE, DISK_BYTES)
