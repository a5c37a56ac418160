"""What a stage comes close to before it ends it: memory of its own, of its container or machine, and space to write to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from slipway.execution.memory import TreeMemory
from slipway.machine.cgroup import ControlGroup, machine_memory
from slipway.observability import metrics
from slipway.sizes import format_size

MEMORY_SHARE = 0.9
"""Of a limit. What is left is enough for a second or two of what stages usually add, so the warning arrives first."""

MACHINE_SHARE = 0.05
"""Of a machine's memory that is left. There is no limit there, and others take from it as well."""

DISK_SHARE, DISK_BYTES = 0.05, 1 << 30
"""Space that is left, whichever is less: a share for small volumes, and on large ones what a fast disk writes in a second."""

Warn = Callable[[str], None]


class Pressure:
    """Warns once of each limit that one attempt comes close to.

    Args:
        stage: Name of the stage.
        workdir: Where it writes.
        max_memory_bytes: Anonymous memory it should stay below.
        warn: Takes the text of a warning.
        group: The control group it is in; this process's by default.
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

    def look(self, memory: TreeMemory) -> None:
        """Compare what there is now with the limits.

        Args:
            memory: Of the stage's processes.
        """
        self._own_limit(memory)
        self._surroundings(memory)
        self._disk()

    def _own_limit(self, memory: TreeMemory) -> None:
        limit = self._max_memory_bytes
        if memory.anonymous >= limit * MEMORY_SHARE:
            share = f"{100 * memory.anonymous // limit} % of the {format_size(limit)} it should stay below"
            self._say("memory", f"holds {format_size(memory.anonymous)} of memory, {share}")

    def _surroundings(self, memory: TreeMemory) -> None:
        group = self._group
        if group is not None:
            used = group.used_bytes()
            if used >= group.limit_bytes * MEMORY_SHARE:
                what = f"{format_size(used)} of the {format_size(group.limit_bytes)} of its container are used"
                self._say(
                    "container_memory", f"may be ended for memory: {what}, {format_size(memory.anonymous)} by itself"
                )
        machine = machine_memory()
        if machine.available_bytes <= machine.total_bytes * MACHINE_SHARE:
            what = (
                f"{format_size(machine.available_bytes)} of the machine's {format_size(machine.total_bytes)} are left"
            )
            self._say("machine_memory", f"may be ended for memory: {what}, {format_size(memory.anonymous)} are its own")

    def _disk(self) -> None:
        try:
            disk = shutil.disk_usage(self._workdir)
        except OSError:  # the folder goes with the attempt
            return
        if nearly_full(disk.free, total=disk.total):
            what = f"{format_size(disk.free)} of {format_size(disk.total)} are left for its work folder"
            self._say("disk", f"runs out of space: {what}; free some, or work on a larger disk")

    def _say(self, kind: str, what: str) -> None:
        if kind in self._said:
            return
        self._said.add(kind)
        metrics.PRESSURE.add(stage=self._stage, kind=kind)
        self._warn(f"{self._stage} {what}")


def nearly_full(free: int, *, total: int) -> bool:
    """Whether so little is left of a file system, in bytes, that a stage may find no space before anybody looks again."""
    return free <= min(total * DISK_SHARE, DISK_BYTES)
