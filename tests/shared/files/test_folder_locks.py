"""A folder is held by one at a time, and only what nobody holds is given away."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

from slipway.files.work_folders import find_unheld, is_at, lock_folder, remove_abandoned, unfinished


def test_only_folders_that_nobody_holds_are_given_one_after_the_other(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    held = lock_folder(tmp_path / "b")
    assert held is not None
    assert lock_folder(tmp_path / "b") is None
    seen = []
    for folder in find_unheld(tmp_path, "*"):
        assert lock_folder(folder) is None
        seen.append(folder.name)
    assert seen == ["a", "c"]
    os.close(held)
    assert [folder.name for folder in find_unheld(tmp_path, "*")] == ["a", "b", "c"]


def test_whoever_gets_a_lock_has_a_folder_however_often_others_remove_it(tmp_path: Path) -> None:
    folder, stop, interval = tmp_path / "wanted", threading.Event(), sys.getswitchinterval()

    def remove() -> None:
        while not stop.is_set():
            for found in find_unheld(tmp_path, "wanted"):
                shutil.rmtree(found)

    thread = threading.Thread(target=remove)
    sys.setswitchinterval(1e-6)  # so that one is often interrupted between opening a folder and locking it
    thread.start()
    try:
        for _ in range(30_000):
            lock = lock_folder(folder)
            if lock is not None:
                assert is_at(lock, folder)
                os.close(lock)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_unfinished_folders_of_the_living_stay(tmp_path: Path) -> None:
    with unfinished(tmp_path / "target") as folder:
        (tmp_path / ".target.slipway-partial-dead").mkdir()
        remove_abandoned(tmp_path)
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []
