"""Warn when a stage comes close to a limit: its own memory, that of its container or machine, or disk space."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from slipway.execution.memory import TreeMemory
from slipway.machine.cgroup import ControlGroup, machine_memory
from slipway.observability import metrics
from slipway.sizes import format_size

MEMORY_SHARE = 0.9
"""Warn at this share of a memory limit. Stages usually need a second or two for the rest, so the warning comes first."""

MACHINE_SHARE = 0.05
"""Warn if only this share of the machine's memory is left. It has no limit per stage, and other programs use it too."""

DISK_SHARE, DISK_BYTES = 0.05, 1 << 30
"""Warn if less space is left than the smaller of these: a share, for small volumes, or the bytes a fast disk writes in a second."""

Warn = Callable[[str], None]


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
