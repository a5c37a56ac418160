"""Folders that processes lock while they use them, so that what a dead one left is told from what a living one needs."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def lock_folder(folder: Path) -> int | None:
    """Descriptor that locks a folder, which is made if need be; None when another process or task holds it."""
    while True:
        with contextlib.suppress(FileExistsError):  # exist_ok looks a second time, and it may be gone by then
            folder.mkdir()
        try:
            lock = _open(folder)
        except FileNotFoundError:  # removed meanwhile by who held it
            continue
        if not _taken(lock):
            os.close(lock)
            return None
        if is_at(lock, folder):
            return lock
        os.close(lock)


def unheld(parent: Path, pattern: str) -> Iterator[Path]:
    """Folders in ``parent`` that nobody holds, sorted; each is locked until the next one is asked for."""
    for folder in sorted(parent.glob(pattern)):
        try:
            lock = _open(folder)
        except OSError:  # gone, or not a folder of one's own
            continue
        try:
            if _taken(lock) and is_at(lock, folder):
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


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
