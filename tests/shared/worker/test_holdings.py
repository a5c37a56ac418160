"""What a worker says of its cache, and that tasks come to their inputs, with a real bucket, coordinator and workers."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from slipway.artifacts import ArtifactStore, LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.collection import collect
from slipway.artifacts.digests import abridged
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.execution.runner import TaskRunner
from slipway.worker import holdings as holdings_module
from slipway.worker.holdings import Holdings
from slipway_coordinator.broker import locality
from slipway_protos.v1 import worker_pb2
from support.coordinators.harness import Harness, states, tiny_export, tiny_task
from support.coordinators.joined_workers import joined
from support.servers.s3_server import BUCKET, S3Server
from support.servers.stored_files import random_file


@pytest.fixture
def bucket(s3: S3Server) -> S3Bucket:
    """An empty part of the server's bucket."""
    return S3Bucket(s3.options(), BUCKET, prefix=uuid.uuid4().hex)


def reported(holdings: Holdings, *, arrives: bool = True) -> set[int] | None:
    """Make a report as the pull loop does; return what it says."""
    request = worker_pb2.SynchronizeRequest(held=holdings.message())
    holdings.note_answered(request) if arrives else holdings.note_lost()
    return set(request.held.artifacts) if request.HasField("held") else None


def test_what_is_in_the_cache_is_said_once_and_after_each_change(
    bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache"))
    holdings = Holdings(TaskRunner(cache, tmp_path / "scratch"))
    holdings.look()
    assert [reported(holdings), reported(holdings)] == [set(), None]
    digests = [cache.put_files({"weights": random_file(tmp_path / name, 100)}) for name in "abc"]
    holdings.look()
    every = set(map(abridged, digests))
    assert [reported(holdings, arrives=False), reported(holdings), reported(holdings)] == [every, every, None]
    holdings.note_lost()  # as after a call that failed: the next may go to another coordinator
    assert reported(holdings) == every
    collect(cache.local, max_bytes=100)
    holdings.look()
    left = cache.local.digests()
    assert len(left) == 1
    assert reported(holdings) == {abridged(left[0])}
    monkeypatch.setattr(holdings_module, "_REPEAT_SECONDS", 0.0)  # a minute otherwise
    assert reported(holdings) is not None


def test_the_artifacts_used_last_are_said_if_there_are_too_many(
    bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings_module, "MOST_HELD", 2)  # as many would take long to make
    cache = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache"))
    digests = [cache.put_files({"weights": random_file(tmp_path / name, 100)}) for name in "abc"]
    cache.fetch(digests[0], tmp_path / "used")
    holdings = Holdings(TaskRunner(cache, tmp_path / "scratch"))
    holdings.look()
    assert reported(holdings) == {abridged(digests[0]), abridged(digests[2])}


def test_what_is_only_partly_there_is_not_said(bucket: S3Bucket, tmp_path: Path) -> None:
    """As of the parts of a model, which the task that joins them fetches without their weights."""
    cache = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache"))
    files = {name: random_file(tmp_path / name, 100) for name in ("a.safetensors", "b.json")}
    digest = cache.remote.put_files(files)
    cache.fetch(digest, tmp_path / "some", leave_out=("*.safetensors",))
    holdings = Holdings(TaskRunner(cache, tmp_path / "scratch"))
    holdings.look()
    assert reported(holdings) == set()
    cache.fetch(digest, tmp_path / "all")
    holdings.look()
    assert reported(holdings) == {abridged(digest)}


def test_a_store_without_a_cache_says_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put_files({"weights": random_file(tmp_path / "a", 100)})
    holdings = Holdings(TaskRunner(store, tmp_path / "scratch"))
    holdings.look()
    assert reported(holdings) is None


class Machines(Harness):
    """A coordinator over a bucket, whose workers have a cache each."""

    remote: S3Store
    opened = 0

    @property
    def store(self) -> ArtifactStore:
        """Return the store of one more machine."""
        self.opened += 1
        return CachedStore(self.remote, LocalStore(self.home / f"cache-{self.opened}"))


@pytest.mark.slow
def test_a_chain_of_tasks_stays_at_the_worker_that_has_the_base(
    bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three workers that could take each task, one fetches the base, which all of them read."""
    monkeypatch.setattr(locality, "LONGEST_SECONDS", 120.0)  # on a busy machine two pass before a worker asks again
    machines = Machines(tmp_path, with_worker=False, options={"workers_gone": False})
    machines.remote = S3Store(bucket)
    (tmp_path / "text").write_text("base")
    weights = random_file(tmp_path / "weights", 3 << 20)
    base = machines.remote.put_files({"weights": weights, "text": tmp_path / "text"})
    chain = [tiny_task("t0"), *(tiny_task(f"t{number}", needs=(f"t{number - 1}",)) for number in range(1, 6))]
    chain = [task.model_copy(update={"inputs": {**task.inputs, "base": "source:base"}}) for task in chain]
    with machines as running, joined(running, "w-a"), joined(running, "w-b"), joined(running, "w-c"):
        export = running.finished(running.submit(tiny_export("x", *chain, base=base)))
        assert set(states(export).values()) == {"succeeded"}, export
        assert len({task.attempts[-1].worker for task in export.tasks}) == 1
    large = [cache for cache in sorted(tmp_path.glob("cache-*")) if LocalStore(cache).size_bytes() >= 3 << 20]
    assert len(large) == 1
