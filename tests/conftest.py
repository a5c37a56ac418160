"""Fixtures for every test: an environment that children inherit, a trained sample, places with limited disk."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.harness.made_once import made_once
from support.servers.s3_server import S3Server, s3_server

pytest_plugins = [
    f"support.harness.{name}" for name in ("leftovers", "encodable_reports", "described_reports", "own_process")
]

TESTS = Path(__file__).parent

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in ("COLUMNS", "LINES"):  # pytest-xdist gives its workers a terminal's size
    os.environ.pop(name, None)
KEPT = ("SLIPWAY_TEST_SAMPLE", "SLIPWAY_TEST_ENVIRONMENTS", "SLIPWAY_TEST_SIGNATURES", "SLIPWAY_TEST_PREVIOUS")
for name in [name for name in os.environ if name.startswith(("EXPORT_", "SLIPWAY_")) and name not in KEPT]:
    del os.environ[name]

# The same cases every time, however slow the machine is; looking for new ones is not what a change is held up for.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Leave seeds to this file: pytest-randomly's would follow the order. Collect no garbage while tests are collected."""
    config.option.randomly_reset_seed = False
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test is the first to need the sample trains it, for minutes: begin with them, so that nobody waits at the end."""
    items.sort(key=lambda item: not needs_sample(item))


# Hundreds of thousands of objects of imported modules never go, and each full collection, of Python's or of the product's own, would
# look at all of them: half a second each, and a third of the time in which tests are collected.
def pytest_collection_finish() -> None:
    """Leave the modules that were imported to collect tests out of every collection of garbage."""
    leave_out_what_stays()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave out what a file's tests imported, too."""
    if nextitem is None or nextitem.path != item.path:
        leave_out_what_stays()


def leave_out_what_stays() -> None:
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what needs the trained sample, before tests are chosen by their marks."""
    if needs_sample(item):
        item.add_marker(pytest.mark.trained)
        item.add_marker(pytest.mark.timeout(1800))


def needs_sample(item: pytest.Item) -> bool:
    return "sample" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Each fixture draws the same numbers, whatever ran before it."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Each test draws the same numbers, whichever of its fixtures were there already."""
    _seed()


def _seed() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained base and adapter as ``slipway sample`` makes them; SLIPWAY_TEST_SAMPLE names one made before."""
    made = os.environ.get("SLIPWAY_TEST_SAMPLE")
    if made:
        return Path(made)
    from slipway.sample import make_sample

    with made_once(tmp_path_factory, "sample") as folder:
        make_sample(folder, threads=1)  # two take longer beside another worker
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own, for running out of space."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"mounting a file system needs privileges: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server; every test takes a prefix of its own."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
