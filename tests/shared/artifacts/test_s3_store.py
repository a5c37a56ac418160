"""The S3 store against a real server: files in parts, files that change, connections."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.digests import action_name, manifest_name
from slipway.artifacts.s3 import client, transfer
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ArtifactError
from slipway.settings.s3 import S3Options, parse_s3_url
from support.servers.s3_server import BUCKET, S3Server
from support.servers.stored_files import digest_of, random_file

PART = 5 << 20  # the smallest the protocol allows


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipart transfers of files that are small enough for a test."""
    monkeypatch.setattr(transfer, "PART_BYTES", PART)


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


def test_connections_notice_that_the_other_side_is_gone(bucket: S3Bucket, s3: S3Server) -> None:
    assert bucket.find("nothing") is None
    connection = bucket.sdk._http.connection_from_url(s3.endpoint).pool.get(timeout=5)
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10


def test_an_object_of_any_size_in_place_of_a_document_is_not_read_into_memory(
    bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LARGEST_LIST", 1000)
    store = S3Store(bucket)
    digest = store.put_files({"weights": random_file(tmp_path / "weights", 10)})
    assert store.exists(digest)
    key = "4" * 64
    for name in (manifest_name(digest), action_name(key)):
        bucket.put(name, b"x" * 1001)
    with pytest.raises(ArtifactError, match="more than 1000 bytes") as raised:
        store.manifest(digest)
    assert raised.value.reason == "ARTIFACT_INVALID"
    assert not store.exists(digest)
    assert store.action(key) is None
    assert bucket.find(manifest_name(digest)) is not None


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


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:99999"},
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000x"},
        {"AWS_ENDPOINT_URL": "http://user:hidden@127.0.0.1"},
        {"AWS_ENDPOINT_URL": "http://127.0.0.1/store"},
        {"AWS_ENDPOINT_URL": "http://[::1"},
        {"AWS_ENDPOINT_URL": "http://user:hidden@[x]"},
        {"AWS_ENDPOINT_URL": "http://two words"},
        {"AWS_REGION": "not a region"},
    ],
    ids=["port", "port-with-letters", "password", "path", "open-bracket", "no-ipv6", "space", "region"],
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
