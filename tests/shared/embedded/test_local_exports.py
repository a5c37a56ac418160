"""The exports of this machine are read without disturbing those that run, and delivered again without a coordinator."""

from __future__ import annotations

import fcntl
import json
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from slipway.configuration import ExportConfiguration
from slipway.embedded.coordinator import Embedded
from slipway.embedded.local_exports import local_exports, succeeded_export
from slipway.errors import ServiceError
from slipway.settings import Settings
from slipway_coordinator.leadership.file_lock import FileLock
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.harness import DIGEST


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


def test_only_an_export_that_has_succeeded_is_delivered_without_a_coordinator(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, scratch=tmp_path / "scratch")
    with succeeded_export(settings, "x") as export:
        assert export is None
    assert not (tmp_path / "exports" / "x").exists()
    with Embedded(settings, "x") as embedded:
        missing = {"base": DIGEST, "adapter": DIGEST}
        name = embedded.client.create_export(ExportConfiguration(), sources=missing, export_id="x").name
        assert list(embedded.client.watch_export(name))[-1].export.state == pb.EXPORT_STATE_FAILED
        with pytest.raises(ServiceError) as refused, succeeded_export(settings, "x"):
            pass
    assert refused.value.reason == "COORDINATOR_LOCKED"
    with succeeded_export(settings, "x") as export:
        assert export is None
    state = tmp_path / "exports" / "x" / "state.db"
    with closing(sqlite3.connect(state)) as database, database:
        [record] = database.execute("SELECT record FROM slipway_exports").fetchone()
        succeeded = json.dumps({**json.loads(record), "state": "succeeded"})
        database.execute("UPDATE slipway_exports SET record = ?, state = 'succeeded'", [succeeded])
    with succeeded_export(settings, "x") as export:
        assert export is not None
        assert export.name == name
        assert not FileLock(state).acquire(), "its artifacts may be removed while they are delivered"
    state.write_bytes(b"no database" * 100)
    with succeeded_export(settings, "x") as export:
        assert export is None


def test_a_finished_export_is_read_without_sqlalchemy(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, scratch=tmp_path / "scratch")
    with Embedded(settings, "fine"):
        pass
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from slipway.embedded.local_exports import succeeded_export\nfrom slipway.settings import Settings\n"
        f"with succeeded_export(Settings(home=Path({str(tmp_path)!r}), scratch=Path({str(tmp_path / 'scratch')!r})), 'fine'):\n"
        "    print('slipway_coordinator.api.messages' in sys.modules, 'sqlalchemy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
