"""Marks of work that is under way over a store in a folder, so that a collection keeps what the work is about to name.

Nothing names an export's sources before its state is made, nor a task's results before its end is reported. A mark is made
before the first of them: a folder that its process locks, and whose time is when the work began. Whatever was used since then may
belong to it. The kernel gives a dead process's lock back, and the next look removes its mark.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from slipway.folders.folder_locks import lock_folder, unheld


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[None]:
    """Hold a mark in a folder while the context lasts."""
    lock, mark = None, folder
    while lock is None:
        mark = folder / uuid.uuid4().hex
        lock = lock_folder(mark)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a look just took it for one that nobody holds, or the store is gone
            mark.rmdir()
        os.close(lock)


def oldest(folder: Path) -> float | None:
    """When the oldest work under way began, in seconds since the epoch; None when there is none. Marks of the dead go."""
    free = set()
    for mark in unheld(folder, "*"):
        free.add(mark)
        with contextlib.suppress(OSError):  # somebody else's folder, with something in it
            mark.rmdir()
    began = []
    for mark in set(folder.iterdir()) - free:
        with contextlib.suppress(FileNotFoundError):  # it ended just now
            began.append(mark.stat().st_mtime)
    return min(began, default=None)
