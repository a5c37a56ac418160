"""Folders that last no longer than the process that works in them.

Put together beside a target and renamed to it, they make the target be there whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from slipway.folders.folder_locks import lock_folder, unheld

_MARK = ".slipway-partial-"


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A hidden sibling of ``target``, locked while this process lives; removed at the end unless it was renamed.

    What a killed process left beside the target is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target.parent)
    folder, lock = _locked(target)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, target: Path) -> None:
    """Rename a finished folder to its target; what was there goes only then."""
    if not target.exists():
        folder.rename(target)
        return
    old = target.parent / f".{target.name}{_MARK}old-{uuid.uuid4().hex[:8]}"
    target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove unfinished folders whose process is gone; a living one holds its folder's lock."""
    for folder in unheld(parent, f".*{_MARK}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _locked(target: Path) -> tuple[Path, int]:
    """Return a new sibling and the descriptor that locks it."""
    while True:
        folder = target.parent / f".{target.name}{_MARK}{uuid.uuid4().hex[:8]}"
        lock = lock_folder(folder)
        if lock is not None:  # nobody took it for abandoned before it was locked
            return folder, lock
