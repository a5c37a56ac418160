"""The cache on a machine in front of a bucket, with several processes and little room."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.collection import collect
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ArtifactError
from support.coordinators.harness import wait_for
from support.servers.s3_server import S3Server
from support.servers.stored_files import digest_of, random_file


def test_a_cache_is_rid_of_what_killed_processes_left(bucket: S3Bucket, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    CachedStore(S3Store(bucket), LocalStore(cache))
    left = [cache / "uploads" / "1", cache / "arriving" / "2.part", cache / "arriving" / "4.lock"]
    written = cache / "arriving" / "3.part"
    for path in [*left, written]:
        path.write_bytes(b"half")
    with written.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        CachedStore(S3Store(bucket), LocalStore(cache))
        assert [path.exists() for path in [*left, written]] == [False, False, False, True]


def test_one_at_a_time_brings_a_blob_and_leaves_no_lock(bucket: S3Bucket, tmp_path: Path) -> None:
    store = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache"))
    inside: list[int] = []
    together = []

    def bring(number: int) -> None:
        for _ in range(100):
            with store._lock_blob("sha256:" + "0" * 64):
                inside.append(number)
                together.append(len(inside))
                time.sleep(0)
                inside.remove(number)

    threads = [threading.Thread(target=bring, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1] * 600
    assert list((tmp_path / "cache" / "arriving").iterdir()) == []


def test_the_cache_fetches_once_and_repairs_itself(bucket: S3Bucket, tmp_path: Path) -> None:
    remote = S3Store(bucket)
    source = random_file(tmp_path / "weights", 1000)
    digest = remote.put_files({"weights": source})
    cache = CachedStore(remote, LocalStore(tmp_path / "cache"))
    first = cache.fetch(digest, tmp_path / "a")
    blob = cache.local.blob_path(remote.manifest(digest).files[0].digest)
    assert (first / "weights").stat().st_ino == blob.stat().st_ino
    name = bucket.listing("blobs/")[0].key
    content = bucket.get(name)
    bucket.delete([name])
    cache.fetch(digest, tmp_path / "b")  # without the remote's help
    bucket.put(name, content)
    blob.unlink()
    blob.write_bytes(b"y" * 1000)
    fresh = CachedStore(remote, LocalStore(tmp_path / "cache"))
    assert digest_of(fresh.fetch(digest, tmp_path / "c") / "weights") == digest_of(source)


def test_the_cache_stays_within_its_limit(bucket: S3Bucket, tmp_path: Path) -> None:
    cache = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache"), max_bytes=2500)
    digests = []
    for number in range(4):
        folder = tmp_path / f"m{number}"
        random_file(folder / "weights", 1000)
        digests.append(cache.put(folder))
        time.sleep(0.02)
        assert cache.local.size_bytes() <= 2500
    assert sorted(cache.local.digests()) == sorted(digests[2:])
    huge = cache.put_files({"weights": random_file(tmp_path / "huge", 5000)})
    assert (cache.fetch(huge, tmp_path / "out") / "weights").stat().st_size == 5000
    assert cache.local.size_bytes() <= 2500
    assert all(cache.exists(digest) for digest in [*digests, huge])


def test_the_cache_gives_way_to_the_work_on_its_disk(bucket: S3Bucket, small_disk: Path, tmp_path: Path) -> None:
    """A task reads 3 MiB and writes as much, beside the cache, on a disk of 8 MiB; the limit of the cache is never reached."""
    remote = S3Store(bucket)
    sources = [random_file(tmp_path / f"source-{number}", 3 << 20) for number in range(4)]
    digests = [remote.put_files({"weights": source}) for source in sources]
    cache = CachedStore(remote, LocalStore(small_disk / "cache"), max_bytes=50_000_000)
    for number, digest in enumerate(digests):
        work = small_disk / f"work-{number}"
        fetched = cache.fetch(digest, work / "in")
        assert digest_of(fetched / "weights") == digest_of(sources[number])
        random_file(work / "out" / "weights", 3 << 20)
        assert cache.exists(cache.put(work / "out"))
        shutil.rmtree(work)
    cache.fetch(digests[-1], small_disk / "again")  # what was used last is still there, and stays while it is used
    assert cache.local.exists(digests[-1])


def test_nothing_goes_where_that_makes_no_room(bucket: S3Bucket, small_disk: Path, tmp_path: Path) -> None:
    """The disk is full of other things: of what does not go, and of links to what was in the cache."""
    remote = S3Store(bucket)
    cache = CachedStore(remote, LocalStore(small_disk / "cache"))
    kept = [cache.local.put_files({"x": random_file(tmp_path / f"{number}", 1 << 20)}) for number in range(3)]
    for number, digest in enumerate(kept):
        cache.local.fetch(digest, small_disk / f"link-{number}")
    (small_disk / "else").write_bytes(bytes(7 << 19))
    small = remote.put_files({"x": random_file(tmp_path / "small", 1 << 20)})
    cache.fetch(small, tmp_path / "small-out")
    assert sum(map(cache.local.exists, kept)) == 2
    large = remote.put_files({"x": random_file(tmp_path / "large", 12 << 20)})
    with pytest.raises(ArtifactError) as caught:
        cache.fetch(large, tmp_path / "large-out")
    assert caught.value.reason == "DISK_FULL"
    assert sum(map(cache.local.exists, kept)) == 2


FETCH = """
import os, sys
from pathlib import Path
from slipway.artifacts.opening import open_store
from slipway.settings import Settings
store = open_store(Settings.from_environment(os.environ))
for number, digest in enumerate(sys.argv[2:]):
    store.fetch(digest, Path(sys.argv[1]) / str(number))
"""


def test_what_another_process_evicts_on_its_way_to_the_bucket_arrives(bucket: S3Bucket, tmp_path: Path) -> None:
    store = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache"))
    done = threading.Event()

    def evict() -> None:
        while not done.is_set():
            collect(store.local, max_bytes=0)

    evicting = threading.Thread(target=evict)
    evicting.start()
    try:
        digests = []
        for number in range(40):
            source = random_file(tmp_path / f"folder-{number}" / "weights", 1_000)
            files = {"weights": source, **{str(n): random_file(source.with_name(str(n)), 10) for n in range(3)}}
            digests.append(store.put(source.parent) if number % 2 else store.put_files(files))
    finally:
        done.set()
        evicting.join()
    assert [store.exists(digest) for digest in digests] == [True] * 40


class EvictedMeanwhile(LocalStore):
    """A cache that another process empties at one moment: just before its n-th path is used."""

    def __init__(self, root: Path, moment: int) -> None:
        super().__init__(root)
        self.others, self.moments = LocalStore(root), moment

    def evict(self) -> None:
        self.moments -= 1
        if self.moments == 0:
            collect(self.others, max_bytes=0)

    def blob_path(self, digest: str) -> Path:
        self.evict()
        return super().blob_path(digest)

    def manifest_path(self, digest: str) -> Path:
        self.evict()
        return super().manifest_path(digest)


# After the third, the cache holds its lock, and nobody evicts.
@pytest.mark.parametrize("moment", range(1, 4))
def test_what_another_process_evicts_while_it_is_fetched_arrives(moment: int, bucket: S3Bucket, tmp_path: Path) -> None:
    weights = random_file(tmp_path / "weights", 1_000)
    digest = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache")).put_files({"weights": weights})
    local = EvictedMeanwhile(tmp_path / "cache", moment)
    fetched = CachedStore(S3Store(bucket), local).fetch(digest, tmp_path / "out")
    assert local.moments <= 0
    assert digest_of(fetched / "weights") == digest_of(weights)


def test_an_eviction_for_another_artifact_leaves_what_is_arriving(bucket: S3Bucket, tmp_path: Path) -> None:
    """The inputs of a task come side by side, and each of them makes room in a full cache."""
    store = CachedStore(S3Store(bucket), LocalStore(tmp_path / "cache"))
    old = store.put_files({"weights": random_file(tmp_path / "old", 2_000)})
    sources = {"first": random_file(tmp_path / "first", 1_000), "second": random_file(tmp_path / "second", 3 << 20)}
    digest = store.remote.put_files(sources)
    first = store.local.blob_path(f"sha256:{digest_of(sources['first'])}")
    survived: list[bool] = []

    def evict(count: int) -> None:
        if count > 1_000 and not survived:
            wait_for(first.exists)
            collect(store.local, max_bytes=1_500)
            survived.append(first.exists())

    store.fetch(digest, tmp_path / "out", on_bytes=evict)
    assert survived == [True]
    assert not store.local.exists(old)


def test_several_processes_share_a_cache(s3: S3Server, bucket: S3Bucket, tmp_path: Path) -> None:
    remote = S3Store(bucket)
    sources = [random_file(tmp_path / f"source-{number}", 300_000) for number in range(6)]
    digests = [remote.put_files({"weights": source}) for source in sources]
    environment = {
        **os.environ, **s3.environment(), "SLIPWAY_HOME": str(tmp_path / "home"), "SLIPWAY_STORE": bucket.url,
        "SLIPWAY_CACHE_SIZE": "1000000",
    }  # fmt: skip
    processes = [
        subprocess.Popen([sys.executable, "-c", FETCH, str(tmp_path / f"out-{number}"), *digests], env=environment)
        for number in range(3)
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    for number in range(3):
        for index, source in enumerate(sources):
            assert digest_of(tmp_path / f"out-{number}" / str(index) / "weights") == digest_of(source)
    cache = LocalStore(tmp_path / "home" / "cache")
    assert cache.size_bytes() <= 1_000_000
    assert list((cache.root / "arriving").iterdir()) == []
