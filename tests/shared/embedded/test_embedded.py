"""The embedded mode: it starts fast, leaves nothing behind, runs side by side, and is the same coordinator."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from slipway.configuration import ExportConfiguration
from slipway.embedded.coordinator import Embedded
from slipway.errors import ServiceError
from slipway.rpc.values import failure_of_status
from slipway.settings import Settings
from support.coordinators.harness import DIGEST, state, wait_for
from support.harness.unhurried import unhurried

SOURCES = {"base": DIGEST, "adapter": DIGEST}


def settings(home: Path) -> Settings:
    return Settings(home=home, scratch=home / "scratch")


def test_it_starts_and_stops_fast_and_leaves_nothing(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = threading.active_count()
    with Embedded(settings(tmp_path), "warm"):  # imports
        pass
    took = []
    for _ in range(5):
        began = time.monotonic()
        with Embedded(settings(tmp_path), "x") as embedded:
            assert list(embedded.client.list_exports()) == []
        took.append(time.monotonic() - began)
    # 0.3 s on an idle machine; a thread that is waited for would make it a second.
    assert min(took) < unhurried(0.95), took
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    wait_for(lambda: threading.active_count() <= threads + 2)  # gRPC keeps some
    assert not (tmp_path / "exports" / "x" / "socket").exists()


def test_a_source_that_is_not_in_the_store_fails_the_export(tmp_path: Path) -> None:
    with Embedded(settings(tmp_path), "x") as embedded:
        name = embedded.client.create_export(ExportConfiguration(), sources=SOURCES, export_id="x").name
        export = list(embedded.client.watch_export(name))[-1].export
    assert state(export) == "failed"
    assert failure_of_status(export.error).reason == "ARTIFACT_NOT_FOUND"


def test_a_stage_that_is_not_installed_fails_its_branch(tmp_path: Path) -> None:
    with Embedded(settings(tmp_path), "x", stages=("other",)) as embedded:
        name = embedded.client.create_export(ExportConfiguration(), sources=SOURCES, export_id="x").name
        export = list(embedded.client.watch_export(name))[-1].export
    failure = failure_of_status(export.error)
    assert failure.reason == "NO_WORKER"
    assert "slipway doctor" in failure.remedy


def test_one_export_runs_once_at_a_time(tmp_path: Path) -> None:
    with Embedded(settings(tmp_path), "x"), pytest.raises(ServiceError) as caught, Embedded(settings(tmp_path), "x"):
        pass
    assert caught.value.reason == "COORDINATOR_LOCKED"


OWN = """
import logging, sys
from pathlib import Path
from dbos import DBOS, DBOSConfig
from slipway.embedded.coordinator import Embedded
from slipway.errors import ServiceError
from slipway.settings import Settings

home = Path(sys.argv[1])
config = DBOSConfig(name="own", system_database_url=f"sqlite:///{home / 'own.db'}", log_level="ERROR", enable_otlp=False)
settings, log = Settings(home=home, scratch=home / "scratch"), logging.getLogger("dbos")

@DBOS.workflow()
def double(number: int) -> int:
    return 2 * number

own = DBOS(config=config)
DBOS.launch()
before = log.level, list(log.handlers)
try:
    with Embedded(settings, "x"):
        pass
except ServiceError as error:
    print(error.reason, error.remedy)
assert (log.level, log.handlers) == before
print(double(21))
DBOS.destroy()
with Embedded(settings, "x") as embedded:
    print(list(embedded.client.list_exports()))
assert (log.level, log.handlers) == before
DBOS(config=config)
DBOS.launch()
print(double(4))
DBOS.destroy()
"""


@pytest.mark.slow
def test_a_programs_own_workflow_engine_is_left_alone(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OWN, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = ["COORDINATOR_LOCKED export in another process, or name a coordinator", "42", "[]", "8"]
    assert done.stdout.splitlines() == expected


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    with Embedded(settings(tmp_path), "x"):
        pass
    path = tmp_path / "exports" / "x" / "state.db"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ServiceError, match="not a database") as caught, Embedded(settings(tmp_path), "x"):
        pass
    assert caught.value.reason == "STATE_SCHEMA"
    assert str(path.parent) in caught.value.remedy
    shutil.rmtree(path.parent)
    with Embedded(settings(tmp_path), "x"):
        pass


TWICE = """
import io, sys
from pathlib import Path
from slipway.embedded.coordinator import Embedded
from slipway.settings import Settings

settings = Settings(home=Path(sys.argv[1]), scratch=Path(sys.argv[1]) / "scratch")
with io.StringIO() as sys.stderr, Embedded(settings, "x"):
    pass
sys.stderr = sys.__stderr__
with Embedded(settings, "x") as embedded:
    print(list(embedded.client.list_exports()))
"""


def test_a_program_may_have_closed_the_standard_error_of_an_earlier_export(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TWICE, tmp_path], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_long_home_still_has_a_socket(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 30)
    with Embedded(settings(home), "x") as embedded:
        assert list(embedded.client.list_exports()) == []
