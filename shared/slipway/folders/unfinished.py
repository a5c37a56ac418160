"""Folders that last no longer than their process.

A result is put together in such a folder and renamed to its target, so the target appears complete or not at all.
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
    """Yield a hidden, locked sibling of ``target``; remove it at the end unless it was renamed.

    First remove leftovers of killed processes beside the target.
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
    """Rename a finished folder to its target; remove the old target only afterwards."""
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
    """Remove unfinished folders whose process is gone; a running process holds its folder's lock."""
    for folder in unheld(parent, f".*{_MARK}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _locked(target: Path) -> tuple[Path, int]:
    """Return a new sibling and the descriptor that locks it."""
    while True:
        folder = target.parent / f".{target.name}{_MARK}{uuid.uuid4().hex[:8]}"
        lock = lock_folder(folder)
        if lock is not None:  # None: another process took the new folder for an abandoned one
            return folder, lock
