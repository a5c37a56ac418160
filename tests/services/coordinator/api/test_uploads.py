"""How much clients may bring at a time, and what is counted of what they bring and read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipway.artifacts import ManifestFile
from slipway.artifacts.digests import digest_bytes
from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.observability import metrics
from slipway.rpc.call_ends import failure_of_call
from slipway.rpc.values import MAX_FILES
from slipway_protos.v1 import artifact_pb2 as pb
from support.coordinators.artifact_places import Place, content, some_files, write
from support.coordinators.harness import wait_for
from support.servers.metrics_page import page

OPEN, LARGEST = 4, 4_000_000  # as many as one client sends at a time: some_files are four contents
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("uploads"), open_uploads=OPEN, upload_bytes=LARGEST) as place:
        yield place


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with metrics.serving("127.0.0.1:0") as port:
        yield port


class Stalled:
    """Uploads that began and do not go on until they are let."""

    def __init__(self, client: Client, project: str, count: int) -> None:
        self._go_on = threading.Event()
        self.calls = [
            client._calls.artifacts.WriteBlob.future(
                self._messages(project, b"%d" % n), metadata=client._calls.metadata()
            )
            for n in range(count)
        ]

    def _messages(self, project: str, data: bytes) -> Iterator[pb.WriteBlobRequest]:
        yield pb.WriteBlobRequest(parent=f"projects/{project}", digest=digest_bytes(data), size_bytes=len(data))
        self._go_on.wait(300)
        yield pb.WriteBlobRequest(data=data)

    def refused(self) -> list[Any]:
        return [call for call in self.calls if call.done()]

    def end(self) -> None:
        """Let them go on, and see that they bring what they announced."""
        self._go_on.set()
        for call in self.calls:
            if call not in self.refused():
                call.result(timeout=120)


def grown(port: int, before: dict[Any, float]) -> dict[tuple[str, ...], float]:
    """What was counted of clients since, by the values of its labels."""
    ours = (metrics.CLIENT_BYTES.name, metrics.CLIENT_REFUSALS.name)
    return {
        tuple(value for _, value in labels): value - before.get((name, labels), 0)
        for (name, labels), value in page(port).items()
        if name in ours and value != before.get((name, labels), 0)
    }


def test_a_project_has_as_many_uploads_open_as_are_allowed(place: Place, port: int, tmp_path: Path) -> None:
    folder, before = some_files(tmp_path), page(port)
    with (
        place.client_of("submitter") as client,
        place.client_of("neighbour") as other,
        place.client_of("admin") as admin,
    ):
        stalled = Stalled(client, "red", OPEN + 2)
        wait_for(lambda: len(stalled.refused()) == 2)
        for call in stalled.refused():
            failure = failure_of_call(call.exception(), address=place.address)
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (failure.reason, failure.retryable) == ("UPLOADS_FULL", True)
        assert write(admin._calls, "red", ManifestFile("", 1, digest_bytes(b"x"), ""), b"x") is REFUSED
        assert grown(port, before)["received", "UPLOADS_FULL"] == 3
        assert other.push_artifact(folder), "another project's are not in its way, which are open all the while"

        pushed, refused = [], grown(port, before)["received", "UPLOADS_FULL"]
        waiting = threading.Thread(target=lambda: pushed.append(client.push_artifact(folder)))
        waiting.start()
        wait_for(lambda: grown(port, before)["received", "UPLOADS_FULL"] > refused)
        assert not pushed
        stalled.end()
        waiting.join(120)
        assert pushed == [other.push_artifact(folder)]


def test_a_file_has_as_many_bytes_as_are_allowed(place: Place, port: int, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, before = tmp_path / "folder" / "file", page(port)
    with place.client_of("submitter") as client:
        file.write_bytes(b"x" * LARGEST)
        assert client.push_artifact(tmp_path / "folder")
        file.write_bytes(b"x" * (LARGEST + 1))
        with pytest.raises(ModelExportError, match=str(LARGEST)) as caught:
            client.push_artifact(tmp_path / "folder")
    assert caught.value.reason == "LIMIT_EXCEEDED"
    assert "SLIPWAY_UPLOAD_SIZE" in caught.value.remedy
    assert grown(port, before) == {("received",): LARGEST, ("received", "LIMIT_EXCEEDED"): 1}


def test_too_many_files_are_not_read(place: Place, tmp_path: Path) -> None:
    files = {f"file-{n}": tmp_path / "is not there" for n in range(MAX_FILES + 1)}
    with place.client_of("submitter") as client, pytest.raises(ModelExportError, match="10001 files") as caught:
        client.push_artifact(files)
    assert caught.value.reason == "LIMIT_EXCEEDED"


def test_what_passes_is_counted(place: Place, port: int, tmp_path: Path) -> None:
    folder = some_files(tmp_path)
    (folder / "large").write_bytes(b"another" * 300_000)
    size = 2_100_000 + 5 + len(str(tmp_path))
    with place.client_of("submitter") as client:
        before = page(port)
        digest = client.push_artifact(folder)
        new = grown(port, before)
        assert set(new) == {("received",)}
        assert size - 5 <= new["received",] <= size, "what another test brought is not asked for"
        before = page(port)
        client.pull_artifact(digest, tmp_path / "pulled")
        assert content(tmp_path / "pulled") == content(folder)
        assert grown(port, before) == {("sent",): size}

        before = page(port)
        wrong = ManifestFile("", 3, digest_bytes(b"abc"), "")
        assert write(client._calls, "red", wrong, b"abd") is grpc.StatusCode.INVALID_ARGUMENT
        request = pb.ReadBlobRequest(name=f"projects/red/artifacts/{digest}", digest=wrong.digest)
        with pytest.raises(grpc.RpcError):
            list(client._calls.artifacts.ReadBlob(request, metadata=client._calls.metadata()))
        refusals = {("received", "ARTIFACT_INVALID"): 1, ("sent", "ARTIFACT_NOT_FOUND"): 1}
        assert grown(port, before) == {("received",): 3} | refusals
