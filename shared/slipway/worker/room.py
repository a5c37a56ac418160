"""Check whether the disk of the work folders has room for another task."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from slipway.execution.pressure import nearly_full
from slipway.sizes import format_size

log = logging.getLogger("slipway.worker")

LOOK_SECONDS = 1.0
"""Interval of the checks. A task granted in between may find no space; then it continues on another worker."""


class Room:
    """Watches the free space of one folder; logs when it runs out and when there is some again.

    Args:
        scratch: Folder for work folders; it exists.

    Attributes:
        enough: Whether there was room at the last check.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.enough = True

    def look(self) -> bool:
        """Check again; return whether the answer has changed."""
        try:
            disk = shutil.disk_usage(self._scratch)
        except OSError:  # the next task will report the fault
            return False
        before, self.enough = self.enough, not nearly_full(disk.free, total=disk.total)
        if self.enough == before:
            return False
        if self.enough:
            log.info(f"takes tasks again: {format_size(disk.free)} are free in {self._scratch}")
        else:
            log.warning(
                f"takes no tasks until there is room: {format_size(disk.free)} of {format_size(disk.total)} are left in "
                f"{self._scratch}; free some, lower SLIPWAY_CACHE_SIZE, or point SLIPWAY_SCRATCH to a larger disk"
            )
        return True

    def free_bytes(self) -> int:
        """Return the free bytes; 0 if unknown."""
        try:
            return shutil.disk_usage(self._scratch).free
        except OSError:
            return 0
