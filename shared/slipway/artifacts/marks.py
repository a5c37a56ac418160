"""Marks of running work in a local folder: a folder that its process locks, and whose time is the beginning of the work.

The kernel releases the lock of a dead process, and the next check removes its mark.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from slipway.files.work_folders import find_unheld, lock_folder

_MARK_NAME = re.compile(r"[0-9a-f]{32}")


@contextlib.contextmanager
def mark_work(folder: Path) -> Iterator[None]:
    """Hold a mark in a folder while the block runs."""
    lock, mark = None, folder
    while lock is None:
        mark = folder / uuid.uuid4().hex
        lock = lock_folder(mark)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a check removed it just now, or the store is gone
            mark.rmdir()
        os.close(lock)


def oldest_work(folder: Path) -> float | None:
    """Return when the oldest running work began, in seconds since the epoch, or None; remove marks of dead processes.

    Ignore everything else in the folder.
    """
    free = set()
    for mark in find_unheld(folder, "[0-9a-f]" * 32):
        free.add(mark)
        with contextlib.suppress(OSError):  # not a mark: a folder with something in it
            mark.rmdir()
    began = []
    for mark in set(folder.iterdir()) - free:
        if _MARK_NAME.fullmatch(mark.name):
            with contextlib.suppress(FileNotFoundError):  # it ended just now
                status = mark.lstat()
                began += [status.st_mtime] if stat.S_ISDIR(status.st_mode) else []
    return min(began, default=None)
