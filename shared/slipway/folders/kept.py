"""Folders that outlast an attempt: what an interrupted one finished is there for the next attempt of the same action.

They lie beside the work folders, named by action key, so whatever is in one belongs to the same inputs, parameters and
versions. A living attempt holds its folder's lock. The folder goes with the action's result; one that nobody came back to
goes after a few days.
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
"""After so long, an attempt that was interrupted is not expected to be repeated."""

_MARK = ".slipway-kept-"


@contextlib.contextmanager
def kept_folder(scratch: Path, stage: str, key: str) -> Iterator[Path | None]:
    """The folder of an action, locked while the context lasts; None while another attempt has it.

    An empty one is removed at the end. Others that nobody used for long are removed first.
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
    """Remove the folders that no living process holds and nobody used for ``seconds``; answers the space of each by name.

    Empty ones go at once: their attempts ended before they had anything to keep.

    Args:
        scratch: Where they lie.
        seconds: Least time since their last use.
        dry_run: Only say which.
    """
    removed = {}
    for folder in unheld(scratch, f".*{_MARK}*"):
        if time.time() - folder.stat().st_mtime >= seconds or not any(folder.iterdir()):
            removed[folder.name] = _own_bytes(folder)
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
    return removed


def _own_bytes(folder: Path) -> int:
    """Return bytes that removing a folder frees: those of files that have no other name."""
    stats = [path.lstat() for path in folder.rglob("*") if not path.is_dir()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)
