"""The cluster's cleanup against a real bucket, while one export runs and others are remembered or forgotten."""

from __future__ import annotations

import json
import time
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.artifacts.cached import CachedStore
from slipway.artifacts.collection import collect
from slipway.artifacts.digests import blob_name
from slipway.artifacts.opening import open_store
from slipway.artifacts.s3 import collection as s3_collection
from slipway.artifacts.s3.store import S3Store
from slipway.settings import Settings
from slipway_protos.v1 import export_pb2
from support.commands.cli import run_here
from support.coordinators.harness import Harness, states, tiny_export, tiny_task, wait_for
from support.manifests.overlay import Cluster, rendered
from support.servers.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.slow

DAYS = 86_400
NOBODYS = "sha256:" + "5" * 64


class OverABucket(Harness):
    """A coordinator and a worker whose artifacts are in a bucket.

    Args:
        home: Of both.
        environment: Says where the bucket is.
    """

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        super().__init__(home)
        self.environment = environment

    @cached_property
    def cached(self) -> CachedStore:
        store = open_store(Settings.from_environment({**self.environment, "SLIPWAY_HOME": str(self.home)}))
        assert isinstance(store, CachedStore)
        return store

    @property
    def store(self) -> Any:
        return self.cached

    @property
    def bucket(self) -> S3Store:
        """What others see, too."""
        return self.cached.remote

    def export(self, name: str) -> export_pb2.Export:
        return self.client.get_export(f"projects/default/exports/{name}")

    def artifacts(self, name: str) -> set[str]:
        """What an export uses and has made until now."""
        made = {digest for task in self.export(name).tasks for digest in task.outputs.values()}
        return {*self.export(name).sources.values(), *made}


@pytest.fixture
def environment(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """As the cleanup's pod has it."""
    given = {**s3.environment(), "SLIPWAY_STORE": f"s3://{BUCKET}/{tmp_path.name}"}
    for name, value in {**given, "SLIPWAY_HOME": str(tmp_path / "pod")}.items():
        monkeypatch.setenv(name, value)
    return given


def clean_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, coordinator: str, days: float = 0.0
) -> Any:
    """Run the rendered command of the CronJob, some days from now; what it says, with its exit code.

    Objects in a bucket have the age that the service gives them, so that the clock of the collection is the one to be moved.
    """
    (job,) = (one for one in Cluster(rendered("production")).workloads() if one.kind == "CronJob")
    words = [word for word in job.container["args"] if not word.startswith("--coordinator=")]
    capfd.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(s3_collection, "time", SimpleNamespace(time=lambda: time.time() + days * DAYS))
        code = run_here(*words, "--coordinator", coordinator)
    return {**json.loads(capfd.readouterr().out), "code": code}


def test_what_an_export_has_survives_and_nothing_else(
    environment: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h").mkdir()
    go = tmp_path / "go"
    with OverABucket(tmp_path / "h", environment) as cluster:
        for name in ("kept", "forgotten"):
            first, second = tiny_task(f"{name}-1"), tiny_task(f"{name}-2", needs=(f"{name}-1",))
            cluster.finished(cluster.submit(tiny_export(name, first, second, base=cluster.base(name))))
        kept, forgotten = cluster.artifacts("kept"), cluster.artifacts("forgotten")
        assert len(kept) == len(forgotten) == 3
        cluster.client.delete_export("projects/default/exports/forgotten")
        waits = tiny_task("b", needs=("a",), sleep_seconds=120, unless=str(go))
        running = tiny_export("running", tiny_task("a"), waits, tiny_task("c", needs=("a", "b")), base=cluster.base())
        cluster.submit(running)
        wait_for(lambda: states(cluster.export("running")).items() >= {"a": "succeeded", "b": "running"}.items())
        used = cluster.artifacts("running")
        assert len(used) == 2
        cluster.bucket.bucket.put(blob_name(NOBODYS), b"of an upload that went no further")

        today = clean_up(capfd, monkeypatch, coordinator=cluster.address)
        assert (today["artifacts"], today["blobs"]) == ([], 0), "nothing of today may go, whoever it belongs to"

        later = clean_up(capfd, monkeypatch, coordinator=cluster.address, days=40)
        assert set(later["artifacts"]) == forgotten
        assert later["blobs"] == len(forgotten) + 1
        assert cluster.bucket.bucket.find(blob_name(NOBODYS)) is None
        assert {digest for digest in kept | used | forgotten if cluster.bucket.exists(digest)} == kept | used

        collect(cluster.cached.local, max_bytes=0)  # so that what follows comes from the bucket
        go.touch()
        assert states(cluster.finished(running.name)) == dict.fromkeys("abc", "succeeded")
        assert all(cluster.bucket.exists(digest) for digest in cluster.artifacts("running"))


def test_nothing_is_removed_while_the_coordinator_is_away(
    environment: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(Settings.from_environment({**environment, "SLIPWAY_HOME": str(tmp_path)}))
    (tmp_path / "text").write_text("of an export that only the coordinator knows")
    digest = store.put_files({"text": tmp_path / "text"})
    said = clean_up(capfd, monkeypatch, coordinator=f"unix:{tmp_path / 'nobody'}", days=40)
    assert (said["code"], said["reason"]) == (7, "COORDINATOR_UNAVAILABLE")
    assert store.exists(digest)
