"""Large files come from the bucket, where the operator lets them, and through the coordinator wherever that fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest

from slipway.artifacts import ArtifactStore, LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.client import Client
from slipway.client.artifacts import ProjectArtifacts
from slipway.client.direct import FAULTS, read_address
from slipway.errors import ConfigurationError, ModelExportError
from slipway.settings import Settings
from slipway_protos.v1 import artifact_pb2 as pb
from support.coordinators.artifact_places import Place, content
from support.servers.free_ports import free_port
from support.servers.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

LARGE = b"0123456789abcdef" * ((9 << 20) // 16)


class BucketPlace(Place):
    """A coordinator whose store is a bucket."""

    s3: S3Server

    def open_store(self) -> ArtifactStore:
        bucket = S3Bucket(self.s3.options(), BUCKET, prefix=self.home.name)
        return CachedStore(S3Store(bucket), LocalStore(self.home / "cache"), max_bytes=None)


@contextmanager
def a_place(home: Path, s3: S3Server, endpoint: str) -> Iterator[Place]:
    home.mkdir()
    place = BucketPlace(home, download_endpoint=endpoint)
    place.s3 = s3
    with place:
        yield place


@pytest.fixture
def place(s3: S3Server, tmp_path: Path) -> Iterator[Place]:
    with a_place(tmp_path / "direct", s3, s3.endpoint) as place:
        yield place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "large").write_bytes(LARGE)
    (folder / "other").write_bytes(LARGE[::-1])
    (folder / "small").write_text("small")
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that came from addresses, file by file."""
    brought: list[int] = []

    def note(uri: str, *, offset: int, size_bytes: int) -> Iterator[bytes]:
        brought.append(0)
        place = len(brought) - 1
        for data in read_address(uri, offset=offset, size_bytes=size_bytes):
            brought[place] += len(data)
            yield data

    monkeypatch.setattr("slipway.client.artifacts.read_address", note)
    return brought


def locate(client: Client, digest: str, path: str = "large") -> pb.LocateBlobResponse:
    file = next(file for file in client.get_artifact(digest).files if file.path == path)
    name = f"projects/{client.project}/artifacts/{digest}"
    return client._calls.call(client._calls.artifacts.LocateBlob, pb.LocateBlobRequest(name=name, digest=file.digest))


def status(uri: str) -> int:
    parts = urlsplit(uri)
    connection = HTTPConnection(parts.netloc, timeout=30)
    connection.request("GET", f"{parts.path}?{parts.query}")
    return connection.getresponse().status


def test_large_files_come_from_the_bucket(place: Place, folder: Path, read: list[int], tmp_path: Path) -> None:
    counted: list[int] = []
    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        client.pull_artifact(digest, tmp_path / "pulled", on_bytes=counted.append)
    assert content(tmp_path / "pulled") == content(folder)
    assert read == [len(LARGE), len(LARGE)], "the small one is not asked for"
    assert sum(counted) == 2 * len(LARGE) + len("small")


def test_who_watches_may_end_it(place: Place, folder: Path, read: list[int], tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise ValueError("enough")

    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        (folder / "small").unlink()
        with pytest.raises(ValueError, match="enough"):
            client.pull_artifact(digest, tmp_path / "pulled", on_bytes=stop)
    assert read
    assert not (tmp_path / "pulled").exists()


def test_an_address_gives_one_file_for_a_while(
    place: Place, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        found, other = locate(client, digest), locate(client, digest, "other")
    assert 0 < found.expire_time.seconds - time.time() <= 900
    assert b"".join(read_address(found.uri, offset=0, size_bytes=len(LARGE))) == LARGE
    assert b"".join(read_address(found.uri, offset=8 << 20, size_bytes=len(LARGE))) == LARGE[8 << 20 :]
    assert SECRET_KEY not in found.uri
    assert ACCESS_KEY in found.uri, "the signature is the access key's"
    assert found.uri not in caplog.text
    assert urlsplit(found.uri).query not in caplog.text
    mine, theirs = urlsplit(found.uri), urlsplit(other.uri)
    assert status(found.uri) == 200
    assert status(mine._replace(path=theirs.path).geturl()) == 403, "it is signed for one object"
    assert status(found.uri.replace("X-Amz-Expires=900", "X-Amz-Expires=90000")) == 403


def test_nobody_gets_an_address_of_anothers_file(place: Place, folder: Path) -> None:
    with place.client_of("submitter") as client, place.client_of("neighbour") as neighbour:
        digest = client.push_artifact(folder)
        large = next(file for file in client.get_artifact(digest).files if file.path == "large")
        name = f"projects/{neighbour.project}/artifacts/{digest}"
        for asked in (pb.LocateBlobRequest(name=name, digest=large.digest), pb.LocateBlobRequest(
            name=f"projects/{client.project}/artifacts/{digest}", digest="sha256:" + "0" * 64
        )):  # fmt: skip
            caller = neighbour if asked.name == name else client
            with pytest.raises(ModelExportError) as error:
                caller._calls.call(caller._calls.artifacts.LocateBlob, asked)
            assert error.value.reason == "ARTIFACT_NOT_FOUND"


@pytest.mark.parametrize("in_bucket", [True, False])
def test_without_one_content_passes_through(
    in_bucket: bool, s3: S3Server, folder: Path, read: list[int], tmp_path: Path
) -> None:
    """The operator names no place for clients, or the store is a folder, which nothing else gives out."""
    (tmp_path / "folders").mkdir()
    made = (
        a_place(tmp_path / "through", s3, "")
        if in_bucket
        else Place(tmp_path / "folders", download_endpoint=s3.endpoint)
    )
    with made as place, place.client_of("submitter") as client:  # type: ignore[attr-defined]
        digest = client.push_artifact(folder)
        assert locate(client, digest) == pb.LocateBlobResponse()
        client.pull_artifact(digest, tmp_path / "pulled")
    assert content(tmp_path / "pulled") == content(folder)
    assert read == []


def test_an_earlier_coordinator_has_no_addresses(
    place: Place, folder: Path, read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unknown(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNIMPLEMENTED

    with place.client_of("submitter") as client:
        digest, send = client.push_artifact(folder), client._calls.send

        def refuse(call: object, request: object) -> object:
            if isinstance(request, pb.LocateBlobRequest):
                raise Unknown
            return send(call, request)  # type: ignore[arg-type]

        monkeypatch.setattr(client._calls, "send", refuse)
        client.pull_artifact(digest, tmp_path / "pulled")
    assert content(tmp_path / "pulled") == content(folder)
    assert read == []


def test_where_the_bucket_cannot_be_reached_content_passes_through(
    s3: S3Server, folder: Path, read: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        a_place(tmp_path / "closed", s3, f"http://127.0.0.1:{free_port()}") as place,
        place.client_of("submitter") as client,
    ):
        digest = client.push_artifact(folder)
        artifacts = ProjectArtifacts(client._calls, client.project)
        artifacts.fetch(digest, tmp_path / "pulled")
        artifacts.fetch(digest, tmp_path / "again")
    assert content(tmp_path / "pulled") == content(tmp_path / "again") == content(folder)
    assert set(read) == {0}
    assert len(read) <= 2, "only files that were asked for at the same time have waited for it"
    assert "passes through the coordinator" in caplog.text
    assert "Signature" not in caplog.text


class _Answers(BaseHTTPRequestHandler):
    """Gives wrong answers in place of a bucket."""

    mode = ""

    def do_GET(self) -> None:
        match self.mode:
            case "wrong":
                self._answer(200, len(LARGE), bytes(len(LARGE)))
            case "short":
                self._answer(200, len(LARGE), LARGE[:3_000_000])
            case "smaller":
                self._answer(200, 5, b"small")
            case "elsewhere":
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
            case "denied":
                self._answer(403, 0, b"")

    def _answer(self, code: int, length: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("mode", ["wrong", "short", "smaller", "elsewhere", "denied"])
def test_what_an_address_gives_is_compared(mode: str, s3: S3Server, folder: Path, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mode", (_Answers,), {"mode": mode}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with a_place(tmp_path / "lying", s3, endpoint) as place, place.client_of("submitter") as client:
            digest = client.push_artifact(folder)
            client.pull_artifact(digest, tmp_path / "pulled")
    finally:
        server.shutdown()
        server.server_close()
    assert content(tmp_path / "pulled") == content(folder)


@pytest.mark.parametrize("uri", ["file:///etc/passwd", "ftp://127.0.0.1/x", "nothing", "http:///x", "http://[::1"])
def test_other_addresses_are_not_read(uri: str) -> None:
    with pytest.raises(FAULTS):
        list(read_address(uri, offset=0, size_bytes=1))


def test_the_setting_is_an_address() -> None:
    read = Settings.from_environment({"SLIPWAY_DOWNLOAD_ENDPOINT": " https://s3.example.com:9000/ "})
    assert read.download_endpoint == "https://s3.example.com:9000"
    for text in (
        "s3.example.com",
        "http://host/bucket",
        "s3://bucket",
        "http://name:secret@host",
        "http://host:999999",
    ):
        with pytest.raises(ConfigurationError, match=r"SLIPWAY_DOWNLOAD_ENDPOINT.*http\(s\)://host") as error:
            Settings.from_environment({"SLIPWAY_DOWNLOAD_ENDPOINT": text})
        assert "secret" not in str(error.value)
