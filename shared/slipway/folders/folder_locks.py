"""Lock folders while a process uses them, to tell leftovers of dead processes from folders in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def lock_folder(folder: Path) -> int | None:
    """Create and lock a folder; return the lock's descriptor, or None if another process or task holds it."""
    while True:
        with contextlib.suppress(FileExistsError):  # exist_ok would check again, when the folder may be gone
            folder.mkdir()
        try:
            lock = _open(folder)
        except FileNotFoundError:  # removed meanwhile by its holder
            continue
        if not _try_lock(lock):
            os.close(lock)
            return None
        if is_at(lock, folder):
            return lock
        os.close(lock)


def find_unheld(parent: Path, pattern: str) -> Iterator[Path]:
    """Yield the folders in ``parent`` that no process holds, sorted; each stays locked until the next one."""
    for folder in sorted(parent.glob(pattern)):
        try:
            lock = _open(folder)
        except OSError:  # gone, or not a folder we may open
            continue
        try:
            if _try_lock(lock) and is_at(lock, folder):
                yield folder
        finally:
            os.close(lock)


def is_at(lock: int, path: Path) -> bool:
    """Return whether a descriptor's folder or file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
