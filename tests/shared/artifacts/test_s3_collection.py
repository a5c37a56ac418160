"""Garbage collection of a bucket."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.artifacts import ActionResult
from slipway.artifacts.digests import ACTIONS, BLOBS, MANIFESTS, blob_name, digest_bytes, manifest_name
from slipway.artifacts.s3 import collection as s3_collection
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.collection import collect_bucket, expire_unfinished_uploads
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ServiceError
from support.servers.s3_server import FaultyProxy, S3Server
from support.servers.stored_files import random_file


def test_collection_leaves_what_is_young_named_or_kept(
    bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = S3Store(bucket)
    shared = random_file(tmp_path / "shared", 10)
    old = patient.put_files({"shared": shared, "own": random_file(tmp_path / "own", 100)})
    patient.record_action("0" * 64, ActionResult({"out": old}))
    bucket.put(blob_name("sha256:" + "1" * 64), b"nobody names me")
    last = max(entry.modified for entry in bucket.listing())
    time.sleep(1.1)  # the server's clock counts seconds
    new = patient.put_files({"shared": shared})
    assert collect_bucket(patient, max_bytes=0).artifacts == ()  # all of it is younger than a day
    hasty = S3Store(bucket, grace_seconds=1000)
    # The clock stands still where all but the new one is too old, however long this takes.
    monkeypatch.setattr(s3_collection, "time", SimpleNamespace(time=lambda: last + 1000.5))
    assert collect_bucket(hasty, max_bytes=0, keep=lambda: [old]).blobs == 1  # the one that nobody names
    planned = collect_bucket(hasty, max_bytes=0, dry_run=True)
    assert (planned.artifacts, planned.blobs, planned.freed_bytes) == ((old,), 1, 100)
    assert hasty.exists(old)
    assert collect_bucket(hasty, max_bytes=0) == planned
    assert hasty.digests() == [new]
    assert hasty.exists(new)
    assert patient.results() is not None
    assert list(patient.results()) == []


def test_collection_leaves_objects_under_other_names_and_what_another_version_wrote(
    bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(bucket, grace_seconds=1)
    digest = store.put_files({"own": random_file(tmp_path / "own", 10)})
    manifest = store.manifest(digest)
    newer = manifest.to_bytes().replace(b'"version":1', b'"version":2')
    bucket.put(manifest_name(digest_bytes(newer)), newer)
    names = [f"{folder}{name}" for folder in (BLOBS, MANIFESTS, ACTIONS) for name in ("note.txt", "ab/x.json")]
    for name in names:
        bucket.put(name, b"somebody's")
    last = max(entry.modified for entry in bucket.listing())
    monkeypatch.setattr(s3_collection, "time", SimpleNamespace(time=lambda: last + 1000))
    keep = [digest_bytes(newer)]
    assert collect_bucket(store, max_age_seconds=0, keep=lambda: keep).artifacts == (digest,)
    assert bucket.find(blob_name(manifest.files[0].digest)) is not None
    assert store.digests() == keep
    assert all(bucket.find(name) is not None for name in names)
    assert list(store.results()) == []


def test_what_comes_into_use_during_a_collection_stays(bucket: S3Bucket, tmp_path: Path) -> None:
    """Found as a result, or made again, when the collection has seen already that it is old and nobody's."""
    store = S3Store(bucket, grace_seconds=1)
    found, made, idle = (
        store.put_files({"own": random_file(tmp_path / name, 10 + len(name))}) for name in ("found", "made", "idle")
    )
    key = "2" * 64
    store.record_action(key, ActionResult({"out": found}))
    time.sleep(2.1)

    def asked() -> list[str]:
        """Everything was listed and read by now; what to keep was settled before these begin."""
        assert store.action(key) is not None
        assert store.put_files({"own": tmp_path / "made"}) == made
        return []

    assert collect_bucket(store, max_age_seconds=0, keep=asked).artifacts == (idle,)
    assert [store.exists(digest) for digest in (found, made, idle)] == [True, True, False]
    assert store.action(key) is not None


def test_nothing_goes_when_nobody_says_what_to_keep(bucket: S3Bucket, tmp_path: Path) -> None:
    store = S3Store(bucket, grace_seconds=1)
    digest = store.put_files({"own": random_file(tmp_path / "own", 10)})
    bucket.put(blob_name("sha256:" + "3" * 64), b"nobody names me")
    time.sleep(2.1)

    def away() -> list[str]:
        raise ServiceError("the coordinator does not answer")

    with pytest.raises(ServiceError):
        collect_bucket(store, max_age_seconds=0, keep=away)
    assert store.exists(digest)
    assert bucket.find(blob_name("sha256:" + "3" * 64)) is not None


def test_a_service_that_lists_milliseconds_is_collected_too(
    s3: S3Server, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MinIO does, which says of a single object only the second."""
    store = S3Store(bucket, grace_seconds=1)
    digest = store.put_files({"own": random_file(tmp_path / "own", 10)})
    time.sleep(2.1)

    def listed(*given: Any, **options: Any) -> Iterator[Any]:
        for entry in list_objects(*given, **options):
            yield replace(entry, last_modified=entry.last_modified.replace(microsecond=789_000))

    list_objects = bucket.sdk.list_objects
    monkeypatch.setattr(
        bucket.sdk, "list_objects", listed
    )  # no MinIO can be had here; its answer differs in this alone
    done = collect_bucket(store, max_age_seconds=0)
    assert (done.artifacts, done.blobs) == ((digest,), 1)
    assert not store.exists(digest)


def test_a_blob_found_again_is_made_as_new(bucket: S3Bucket, tmp_path: Path) -> None:
    """A collection that has listed it as old and unnamed must not remove what is about to be named."""
    source = random_file(tmp_path / "weights", 100)
    name = S3Store(bucket).manifest(S3Store(bucket).put_files({"weights": source})).files[0].digest
    bucket.delete(entry.key for entry in bucket.listing("manifests/"))
    before = bucket.find(blob_name(name))
    time.sleep(1.1)  # the server's clock counts seconds
    S3Store(bucket, grace_seconds=2).put_files({"weights": source})
    found = bucket.find(blob_name(name))
    assert before is not None
    assert found is not None
    assert found.modified > before.modified
    assert bucket.get(blob_name(name)) == source.read_bytes()


def test_unfinished_uploads_expire_and_other_rules_stay(s3: S3Server) -> None:
    own = f"lifecycle-{uuid.uuid4().hex}"  # that of the common bucket is what other tests have made it
    s3.client().make_bucket(own)
    first = S3Bucket(s3.options(), own, prefix="lifecycle/one")
    second = S3Bucket(s3.options(), own, prefix="lifecycle/two")
    assert expire_unfinished_uploads(first)
    assert expire_unfinished_uploads(second)
    assert expire_unfinished_uploads(first)
    with FaultyProxy(s3.endpoint, refuse=1.0, status=501) as proxy:  # an answer without an S3 error in it
        assert not expire_unfinished_uploads(S3Bucket(s3.options(endpoint=proxy.endpoint), own, prefix="lifecycle/one"))
    rules = s3.client().get_bucket_lifecycle(own).rules
    assert sorted(rule.rule_filter.prefix for rule in rules) == ["lifecycle/one/blobs/", "lifecycle/two/blobs/"]
