"""Work on a bucket that outlasts the grace period of collections keeps what it uses."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.digests import blob_name
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.collection import collect_bucket
from slipway.artifacts.s3.store import S3Store
from support.servers.s3_server import BUCKET, S3Server

GRACE = 2.0
NOBODYS = blob_name("sha256:" + "7" * 64)


@pytest.fixture
def bucket(s3: S3Server) -> S3Bucket:
    return S3Bucket(s3.options(), BUCKET, prefix=f"uses-{uuid.uuid4().hex}")


@pytest.mark.slow
def test_long_work_keeps_what_it_used_until_it_ends(bucket: S3Bucket, tmp_path: Path) -> None:
    """And a mark of work that cannot be understood keeps everything."""
    store = S3Store(bucket, grace_seconds=GRACE)
    (tmp_path / "weights").write_bytes(b"weights")
    with CachedStore(store, LocalStore(tmp_path / "cache")).using():
        digest = store.put_files({"weights": tmp_path / "weights"})
        bucket.put(NOBODYS, b"of an artifact that the work is still writing")
        time.sleep(2 * GRACE + 1.1)  # the server's clock counts seconds
        done = collect_bucket(store, max_age_seconds=0)
        assert (done.artifacts, done.blobs) == ((), 0)
        assert store.exists(digest)
    assert bucket.listing("uses/") == []
    named = "uses/" + "a" * 32
    for mark, content, kept in (
        (named, b"100", True), (named, b"", True), (named, b"-1", True), (named, "\u0661".encode(), True),
        (named, b"9" * 10_000, True), (named, b"0", False), ("uses/note.txt", b"100", False), ("uses/" + "A" * 32, b"100", False),
    ):  # fmt: skip
        bucket.put(mark, content)
        doomed = collect_bucket(store, max_age_seconds=0, dry_run=True).artifacts
        assert doomed == (() if kept else (digest,)), (mark, content[:10])
        bucket.delete([mark])
    done = collect_bucket(store, max_age_seconds=0)
    assert (done.artifacts, done.blobs) == ((digest,), 2)


def test_short_work_writes_no_mark(bucket: S3Bucket) -> None:
    with S3Store(bucket).using():
        assert bucket.listing("uses/") == []


def test_the_mark_of_a_dead_process_gets_old(bucket: S3Bucket, tmp_path: Path) -> None:
    store = S3Store(bucket, grace_seconds=GRACE)
    (tmp_path / "weights").write_bytes(b"weights")
    digest = store.put_files({"weights": tmp_path / "weights"})
    bucket.put("uses/" + "b" * 32, b"100000")
    assert collect_bucket(store, max_age_seconds=0).artifacts == ()
    time.sleep(GRACE + 1.1)
    assert collect_bucket(store, max_age_seconds=0).artifacts == (digest,)
