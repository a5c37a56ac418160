"""Reading the exports of this machine does not disturb exports that start meanwhile."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import pytest

from slipway.embedded.coordinator import Embedded
from slipway.embedded.local_exports import local_exports
from slipway.errors import ServiceError
from slipway.settings import Settings
from slipway_coordinator.leadership.file_lock import FileLock


def test_an_export_starts_while_somebody_looks_whether_it_runs(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "state.db")
    looking = (tmp_path / "state.db.lock").open("wb")
    fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
    done = threading.Timer(0.1, looking.close)
    done.start()
    assert lock.acquire()
    done.join()
    other = FileLock(tmp_path / "state.db")
    began = time.monotonic()
    assert not other.acquire()
    assert time.monotonic() - began < 5
    assert "is active on" in str(other.refusal())
    lock.release()


def test_a_filter_is_checked_even_where_nothing_can_match(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="state~") as refused:
        local_exports(Settings(home=tmp_path, scratch=tmp_path / "scratch"), filter="state~")
    assert refused.value.reason == "REQUEST_INVALID"


def test_one_export_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, scratch=tmp_path / "scratch")
    with Embedded(settings, "fine"):
        found = {export.id: export for export in local_exports(settings)}
        assert found["fine"].state == "starting"
        for name in ("lock", "state"):
            folder = tmp_path / "exports" / f"no-{name}"
            folder.mkdir()
            (folder / "state.db").touch()
        (tmp_path / "exports" / "no-lock" / "state.db.lock").mkdir()
        (tmp_path / "exports" / "no-state" / "state.db").unlink()
        (tmp_path / "exports" / "no-state" / "state.db").mkdir()
        found = {export.id: export for export in local_exports(settings)}
    assert {name: export.state for name, export in found.items()} == {
        "fine": "starting",
        "no-lock": "unreadable",
        "no-state": "unreadable",
    }
    assert "state.db.lock cannot be read" in found["no-lock"].problem
