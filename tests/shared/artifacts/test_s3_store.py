"""The S3 store against a real server: large files, faults on the way, several processes, collection, credentials."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipway.artifacts import ActionResult, LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.collection import collect
from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.names import ACTIONS, BLOBS, MANIFESTS, blob_name, manifest_name
from slipway.artifacts.s3 import collection as s3_collection
from slipway.artifacts.s3 import transfer
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.collection import collect_bucket, expire_unfinished_uploads
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ArtifactError, ServiceError
from slipway.settings.s3 import S3Options, parse_s3_url
from support.commands.cli import start
from support.servers.s3_server import BUCKET, READER_KEY, READER_SECRET, FaultyProxy, S3Server, s3_server

PART = 5 << 20  # the smallest the protocol allows


@pytest.fixture
def bucket(s3: S3Server) -> S3Bucket:
    return S3Bucket(s3.options(), BUCKET, prefix=uuid.uuid4().hex)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipart transfers of files that are small enough for a test."""
    monkeypatch.setattr(transfer, "PART_BYTES", PART)


def random_file(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def through(proxy: FaultyProxy, s3: S3Server, *, patience: float = 120) -> S3Store:
    options = s3.options(endpoint=proxy.endpoint)
    return S3Store(S3Bucket(options, BUCKET, prefix=uuid.uuid4().hex, patience_seconds=patience))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("size", [PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 17])
def test_files_of_any_number_of_parts_come_back(bucket: S3Bucket, tmp_path: Path, size: int) -> None:
    source = random_file(tmp_path / "weights", size)
    counted = []
    store = S3Store(bucket)
    digest = store.put_files({"weights": source})
    out = store.fetch(digest, tmp_path / "out", on_bytes=counted.append)
    assert digest_of(out / "weights") == digest_of(source)
    assert sum(counted) == size
    assert oct((out / "weights").stat().st_mode)[-3:] == "444"


def test_what_is_there_is_not_sent_again(bucket: S3Bucket, tmp_path: Path) -> None:
    store = S3Store(bucket)
    source = random_file(tmp_path / "weights", 1000)
    store.put_files({"weights": source})
    before = bucket.listing("blobs/")
    time.sleep(1.1)  # the server's clock counts seconds
    store.put_files({"other-name": source})
    assert bucket.listing("blobs/") == before
    assert len(store.digests()) == 2


def test_a_file_that_changes_while_it_is_stored_is_refused(bucket: S3Bucket, tmp_path: Path) -> None:
    source = random_file(tmp_path / "weights", 1000)

    def change(count: int) -> None:
        source.write_bytes(b"x" * (1000 + count))

    with pytest.raises(ArtifactError, match="changed while it was being stored") as raised:
        S3Store(bucket).put_files({"weights": source}, on_bytes=change)
    assert raised.value.reason == "FILE_ERROR"
    assert bucket.listing() == []


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_a_fifth_of_calls_refused_and_answers_cut_short(s3: S3Server, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_file(folder / "weights", 2 * PART + 3)
    for number in range(8):
        random_file(folder / f"shard-{number}", 3000)
    expected = {path.name: digest_of(path) for path in folder.iterdir()}
    with FaultyProxy(s3.endpoint, refuse=0.2, truncate=0.4, seed=7) as proxy:
        store = through(proxy, s3)
        digest = store.put(folder)
        assert store.exists(digest)
        store.record_action("0" * 64, ActionResult({"out": digest}))
        assert store.action("0" * 64) == ActionResult({"out": digest})
        out = store.fetch(digest, tmp_path / "out")
        assert {path.name: digest_of(path) for path in out.iterdir()} == expected
        assert proxy.refused > 5
        assert proxy.truncated > 2


def test_an_answer_that_is_less_than_all_takes_nothing_from_the_bucket(
    s3: S3Server, bucket: S3Bucket, tmp_path: Path
) -> None:
    """Neither a manifest, nor what says that there is none."""
    store = S3Store(bucket)
    digest = store.put_files({"weights": random_file(tmp_path / "weights", 1000)})
    with FaultyProxy(s3.endpoint) as proxy:
        behind = S3Store(S3Bucket(s3.options(endpoint=proxy.endpoint), BUCKET, prefix=bucket.prefix))
        proxy.shorten = 1
        assert behind.manifest(digest) == store.manifest(digest)
        proxy.shorten = 1
        assert not behind.exists("sha256:" + "0" * 64)
        assert proxy.shorten == 0


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_service_that_stays_away_is_unavailable(s3: S3Server, tmp_path: Path, status: int) -> None:
    with FaultyProxy(s3.endpoint, refuse=1.0, status=status) as proxy:
        store = through(proxy, s3, patience=0.5)
        with pytest.raises(ArtifactError) as raised:
            store.put_files({"x": random_file(tmp_path / "x", 10)})
    assert (raised.value.reason, raised.value.retryable) == ("STORE_UNAVAILABLE", True)
    with pytest.raises(ArtifactError) as raised:  # nobody listens there any more
        store.exists("sha256:" + "0" * 64)
    assert raised.value.reason == "STORE_UNAVAILABLE"


def test_waiting_for_a_service_can_be_stopped(s3: S3Server, tmp_path: Path) -> None:
    stop = threading.Event()

    def check(_: int) -> None:
        if stop.is_set():
            raise KeyError("cancelled")

    with FaultyProxy(s3.endpoint, refuse=1.0) as proxy:
        store = through(proxy, s3, patience=600)
        threading.Timer(0.5, stop.set).start()
        begin = time.monotonic()
        file = random_file(tmp_path / "x", 10)
        with pytest.raises(KeyError):
            store.put_files({"x": file}, on_bytes=check)
        assert time.monotonic() - begin < 60  # not 600


def test_ctrl_c_does_not_wait_for_a_service_that_is_away(s3: S3Server, tmp_path: Path) -> None:
    for number in range(20):
        random_file(tmp_path / "folder" / str(number), 10)
    with FaultyProxy(s3.endpoint, refuse=1.0) as proxy:
        away = {**s3.environment(), "AWS_ENDPOINT_URL": proxy.endpoint, "SLIPWAY_STORE": f"s3://{BUCKET}/away"}
        process = start(["push", tmp_path / "folder"], tmp_path / "home", **away)
        assert process.stderr is not None
        assert "does not answer" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)  # calls are repeated for 60 seconds
    assert process.returncode == 130


def test_refused_credentials_are_named_and_never_shown(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "wrong-and-still-secret"
    wrong = S3Store(S3Bucket(s3.options(secret_key=secret), BUCKET))
    reader = S3Store(S3Bucket(s3.options(access_key=READER_KEY, secret_key=READER_SECRET), BUCKET))
    for store in (wrong, reader):
        with pytest.raises(ArtifactError) as raised:
            store.put_files({"x": random_file(tmp_path / "x", 10)})
        assert raised.value.reason == "STORE_DENIED"
        assert not raised.value.retryable
        assert secret not in str(raised.value)
        assert READER_SECRET not in str(raised.value)
    assert secret not in caplog.text
    assert READER_SECRET not in caplog.text
    assert READER_SECRET not in repr(s3.options(secret_key=READER_SECRET))


def test_a_missing_bucket_and_missing_credentials(s3: S3Server) -> None:
    with pytest.raises(ArtifactError) as raised:
        S3Bucket(s3.options(), "no-such-bucket").listing()
    assert raised.value.reason == "STORE_INVALID"
    nobody = S3Options.from_environment(
        {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    )
    with pytest.raises(ArtifactError) as raised:
        S3Bucket(nobody, BUCKET)
    assert raised.value.reason == "STORE_DENIED"


def test_credentials_are_read_from_a_file_again_for_every_request(s3: S3Server, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = NOBODY\naws_secret_access_key = nothing\n")
    options = S3Options.from_environment({"AWS_ENDPOINT_URL": s3.endpoint, "AWS_SHARED_CREDENTIALS_FILE": str(file)})
    bucket = S3Bucket(options, BUCKET)
    with pytest.raises(ArtifactError):
        bucket.listing("nothing/")
    file.write_text(f"[default]\naws_access_key_id = {READER_KEY}\naws_secret_access_key = {READER_SECRET}\n")
    assert bucket.listing("nothing/") == []


@pytest.mark.parametrize(
    ("content", "profile"),
    [
        ("[default]\naws_access_key_id = x\naws_secret_access_key = hidden\n", "other"),
        ("[other]\naws_access_key_id = hidden\n", "other"),
        ("hidden", "default"),
    ],
    ids=["no-such-profile", "half-a-profile", "no-profiles"],
)
def test_a_credentials_file_without_credentials_is_named(
    s3: S3Server, tmp_path: Path, content: str, profile: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(content)
    variables = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": profile}
    bucket = S3Bucket(S3Options.from_environment({"AWS_ENDPOINT_URL": s3.endpoint, **variables}), BUCKET)
    with pytest.raises(ArtifactError, match=re.escape(f"{file}, profile {profile}")) as raised:
        bucket.listing()
    assert raised.value.reason == "STORE_DENIED"
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:99999"},
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000x"},
        {"AWS_ENDPOINT_URL": "http://user:hidden@127.0.0.1"},
        {"AWS_ENDPOINT_URL": "http://127.0.0.1/store"},
        {"AWS_REGION": "not a region"},
    ],
    ids=["port", "port-with-letters", "password", "path", "region"],
)
def test_an_endpoint_that_is_none_is_refused(variables: dict[str, str]) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    with pytest.raises(ArtifactError) as raised:
        S3Bucket(S3Options.from_environment({**keys, **variables}), BUCKET)
    assert raised.value.reason == "STORE_INVALID"
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://",
            "s3:///x",
            "http://bucket/x",
            "s3://user:secret@bucket/x",
            "s3://bucket/x?y",
            "s3://b/x",
            "s3://[/x",
        ),
        *("s3://a bucket/x", "s3://bucket:80/x", "s3://a..bucket/x", "s3://10.0.0.7/x"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ArtifactError) as raised:
        parse_s3_url(url)
    assert raised.value.reason == "STORE_INVALID"
    assert "secret" not in str(raised.value.failure())


def test_what_an_address_names() -> None:
    assert parse_s3_url("s3://bucket") == parse_s3_url("s3://bucket//") == ("bucket", "")
    assert parse_s3_url("s3://my.bucket-1/runs/a..b/ä /") == ("my.bucket-1", "runs/a..b/ä ")


def test_connections_notice_that_the_other_side_is_gone(bucket: S3Bucket, s3: S3Server) -> None:
    assert bucket.find("nothing") is None
    connection = bucket.sdk._http.connection_from_url(s3.endpoint).pool.get(timeout=5)
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10


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
            with store._alone("sha256:" + "0" * 64):
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


def test_a_full_disk_is_said(bucket: S3Bucket, small_disk: Path, tmp_path: Path) -> None:
    store = S3Store(bucket)
    digest = store.put_files({"weights": random_file(tmp_path / "weights", 16 << 20)})
    with pytest.raises(ArtifactError) as raised:
        store.fetch(digest, small_disk / "out")
    assert raised.value.reason == "DISK_FULL"
    with pytest.raises(ArtifactError) as raised:
        CachedStore(store, LocalStore(small_disk / "cache")).fetch(digest, tmp_path / "out")
    assert raised.value.reason == "DISK_FULL"
    assert not any((small_disk / "cache" / "blobs").rglob("*.*"))


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
    rules = s3.client().get_bucket_lifecycle(own).rules
    assert sorted(rule.rule_filter.prefix for rule in rules) == ["lifecycle/one/blobs/", "lifecycle/two/blobs/"]


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


@pytest.mark.cluster
def test_transfers_outlast_ten_seconds_without_a_server(tmp_path: Path) -> None:
    with s3_server(tmp_path / "server") as server:
        store = S3Store(S3Bucket(server.options(), BUCKET, prefix="p"))
        before = random_file(tmp_path / "before", 40 << 20)
        held = store.put_files({"weights": before})
        results: dict[str, object] = {}
        after = random_file(tmp_path / "after", 200 << 20)
        sent: list[int] = []

        def put() -> None:
            results["put"] = store.put_files({"weights": after}, on_bytes=sent.append)

        def fetch() -> None:
            results["fetch"] = digest_of(store.fetch(held, tmp_path / "out") / "weights")

        threads = [threading.Thread(target=work) for work in (put, fetch)]
        threads[0].start()
        while sum(sent) < 20 << 20:  # in the middle of the upload
            time.sleep(0.001)
        server.stop()
        assert "put" not in results
        threads[1].start()
        time.sleep(10)
        server.start()
        for thread in threads:
            thread.join(200)
        assert results["fetch"] == digest_of(before)
        assert digest_of(store.fetch(str(results["put"]), tmp_path / "back") / "weights") == digest_of(
            tmp_path / "after"
        )
