"""Folders of work: locked while a process uses them, then removed, or kept for the next attempt.

The lock tells leftovers of dead processes from folders in use.

A result is put together in a folder that ends with its process, and renamed to its target: the target appears complete or not
at all.

A kept folder lies beside the work folders and is named by action key, so its content belongs to the same inputs, parameters and
versions: the next attempt reuses what an interrupted one finished. A stage that keeps a memory has one for all of its actions. A
kept folder is removed with the action's result, or after a few days without use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

UNUSED_SECONDS = 3 * 86_400
"""After this time an interrupted attempt is not expected to be repeated."""

MEMORY = "memory"
"""Stands for the action key in the name of the folder of a stage that keeps a memory."""

_KEPT = ".slipway-kept-"

_UNFINISHED = ".slipway-partial-"


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


@contextlib.contextmanager
def kept_folder(scratch: Path, stage: str, key: str) -> Iterator[Path | None]:
    """Lock the folder of an action while the block runs; yield None if another attempt has it.

    Remove the folder at the end if it is empty. First remove other folders that have not been used for long.
    """
    folder = scratch / f".{stage}{_KEPT}{key}"
    lock = lock_folder(folder)
    remove_unused(scratch, seconds=UNUSED_SECONDS)
    if lock is None:
        yield None
        return
    try:
        os.utime(folder)
        yield folder
    finally:
        if is_at(lock, folder):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(lock)


def remove_unused(scratch: Path, *, seconds: float, dry_run: bool = False) -> dict[str, int]:
    """Remove the folders that no process holds and that were not used for ``seconds``; return the freed bytes of each by name.

    Remove empty ones at once: their attempts ended before they had anything to keep.

    Args:
        scratch: The folder that holds them.
        seconds: Least time since their last use.
        dry_run: Only report them.
    """
    removed = {}
    for folder in find_unheld(scratch, f".*{_KEPT}*"):
        if time.time() - folder.stat().st_mtime >= seconds or not any(folder.iterdir()):
            removed[folder.name] = _own_bytes(folder)
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
    return removed


def _own_bytes(folder: Path) -> int:
    """Return the bytes that removing a folder frees: those of files without another hard link."""
    stats = [path.lstat() for path in folder.rglob("*") if not path.is_dir()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Yield a hidden, locked sibling of ``target``; remove it at the end unless it was renamed.

    First remove leftovers of killed processes beside the target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target.parent)
    folder, lock = _make_locked(target)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, target: Path) -> None:
    """Rename a finished folder to its target; remove the old target only afterwards."""
    if not target.exists():
        folder.rename(target)
        return
    old = target.parent / f".{target.name}{_UNFINISHED}old-{uuid.uuid4().hex[:8]}"
    target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove unfinished folders whose process is gone; a running process holds its folder's lock."""
    for folder in find_unheld(parent, f".*{_UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _make_locked(target: Path) -> tuple[Path, int]:
    """Return a new sibling and the descriptor that locks it."""
    while True:
        folder = target.parent / f".{target.name}{_UNFINISHED}{uuid.uuid4().hex[:8]}"
        lock = lock_folder(folder)
        if lock is not None:  # None: another process took the new folder for an abandoned one
            return folder, lock
