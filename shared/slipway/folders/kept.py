"""Folders that outlast an attempt: the next attempt of the same action reuses what an interrupted one finished.

They lie beside the work folders and are named by action key, so their content belongs to the same inputs, parameters and versions.
A stage that remembers has one for all of its actions. A running attempt holds its folder's lock. The folder is removed with the action's result, or after a few days without use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from slipway.folders.folder_locks import is_at, lock_folder, unheld

UNUSED_SECONDS = 3 * 86_400
"""After this time an interrupted attempt is not expected to be repeated."""

MEMORY = "memory"
"""Stands for the action key in the name of the folder of a stage that remembers."""

_MARK = ".slipway-kept-"


@contextlib.contextmanager
def kept_folder(scratch: Path, stage: str, key: str) -> Iterator[Path | None]:
    """Lock the folder of an action while the block runs; yield None if another attempt has it.

    Remove the folder at the end if it is empty. First remove other folders that have not been used for long.
    """
    folder = scratch / f".{stage}{_MARK}{key}"
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
    for folder in unheld(scratch, f".*{_MARK}*"):
        if time.time() - folder.stat().st_mtime >= seconds or not any(folder.iterdir()):
            removed[folder.name] = _own_bytes(folder)
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
    return removed


def _own_bytes(folder: Path) -> int:
    """Return the bytes that removing a folder frees: those of files without another hard link."""
    stats = [path.lstat() for path in folder.rglob("*") if not path.is_dir()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)
