"""An upload that breaks off goes on where it ended, for its own principal and for a while."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from slipway.artifacts import LocalStore, ManifestFile
from slipway.artifacts.blobs import BlobWriter, LocalBlobs
from slipway.artifacts.digests import digest_bytes
from slipway.client import Client
from slipway.client.calls import BlockingCalls
from slipway.rpc.call_ends import failure_of_call
from slipway_coordinator.transfers import InterruptedUploads
from slipway_protos.v1 import artifact_pb2 as pb
from support.coordinators.artifact_places import Place, content, create
from support.coordinators.harness import wait_for

DATA = bytes(range(256)) * 20_000
FILE = ManifestFile("file", len(DATA), digest_bytes(DATA), "")
HALF = 3_000_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("interrupted")) as place:
        yield place


def kept(client: Client, project: str = "red") -> int:
    request = pb.GetUploadRequest(parent=f"projects/{project}", digest=FILE.digest)
    return client._calls.send(client._calls.artifacts.GetUpload, request).offset


def messages(data: bytes, *, offset: int = 0) -> Iterator[pb.WriteBlobRequest]:
    yield pb.WriteBlobRequest(parent="projects/red", digest=FILE.digest, size_bytes=len(DATA), offset=offset)
    for at in range(0, len(data), 500_000):
        yield pb.WriteBlobRequest(data=data[at : at + 500_000])


def break_off(client: Client, place: Place) -> None:
    """Upload the first half, and cancel the call once the coordinator has written it."""
    end = threading.Event()

    def half() -> Iterator[pb.WriteBlobRequest]:
        yield from messages(DATA[:HALF])
        end.wait(60)

    call = client._calls.artifacts.WriteBlob.future(half(), metadata=client._calls.metadata())
    wait_for(lambda: any(path.stat().st_size == HALF for path in place.home.rglob("uploads/*")))
    call.cancel()
    end.set()
    wait_for(lambda: kept(client) == HALF)


def reason_of(client: Client, sent: Iterator[pb.WriteBlobRequest]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        client._calls.artifacts.WriteBlob(sent, metadata=client._calls.metadata())
    return failure_of_call(caught.value, address="").reason


def test_it_goes_on_where_it_ended(place: Place, tmp_path: Path) -> None:
    with place.client_of("submitter", project="red") as client:
        assert kept(client) == 0
        break_off(client, place)
        rest = messages(DATA[HALF:], offset=HALF)
        client._calls.artifacts.WriteBlob(rest, metadata=client._calls.metadata())
        assert kept(client) == 0
        made = create(client, [FILE])
        assert not made.missing
        client.pull_artifact(made.digest, tmp_path / "pulled")
        assert content(tmp_path / "pulled") == {"file": DATA}


def test_it_is_lost_to_others_and_from_another_place(place: Place) -> None:
    with place.client_of("submitter", project="red") as client, place.client_of("admin") as other:
        break_off(client, place)
        assert kept(other) == 0, "another principal does not learn of it"
        assert reason_of(other, messages(DATA[HALF:], offset=HALF)) == "UPLOAD_LOST"
        assert reason_of(client, messages(DATA[HALF - 1 :], offset=HALF - 1)) == "UPLOAD_LOST"
        assert reason_of(client, messages(b"", offset=len(DATA) + 1)) == "REQUEST_INVALID"
        longer = pb.WriteBlobRequest(parent="projects/red", digest=FILE.digest, size_bytes=len(DATA) + 1, offset=HALF)
        assert reason_of(client, iter([longer])) == "UPLOAD_LOST"
        assert kept(client) == HALF, "a wrong offset or size loses nothing"
        assert reason_of(client, messages(b"x" * (len(DATA) - HALF), offset=HALF)) == "ARTIFACT_INVALID"
        assert kept(client) == 0, "content of another digest is not kept"


def test_one_that_begins_anew_ends_the_interrupted_one(place: Place) -> None:
    with place.client_of("submitter", project="red") as client:
        break_off(client, place)
        client._calls.artifacts.WriteBlob(messages(DATA), metadata=client._calls.metadata())
        assert kept(client) == 0
        wait_for(lambda: not list(place.home.rglob("uploads/*")))


def test_a_client_sends_only_the_rest(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the first attempt ends with an error in the middle; the second one begins there."""
    data = bytes(reversed(DATA))
    (tmp_path / "file").write_bytes(data)
    received: list[int] = []
    write, take = BlobWriter.write, threading.Lock()

    def counted(writer: BlobWriter, piece: bytes) -> None:
        with take:
            received.append(len(piece))
        write(writer, piece)

    monkeypatch.setattr(BlobWriter, "write", counted)
    with place.client_of("submitter", project="red") as client:
        stub, attempts = client._calls.artifacts, []
        calls = stub.WriteBlob

        def breaking(sent: Iterator[pb.WriteBlobRequest], **options: object) -> object:
            attempts.append(sent)
            if len(attempts) > 1:
                return calls(sent, **options)
            end = threading.Event()

            def some() -> Iterator[pb.WriteBlobRequest]:
                for _ in range(4):
                    yield next(source)
                end.wait(60)

            source = iter(sent)
            call = calls.future(some(), **options)
            wait_for(lambda: sum(received) >= 3 << 20)
            call.cancel()
            end.set()
            digest = digest_bytes(data)
            request = pb.GetUploadRequest(parent="projects/red", digest=digest)
            wait_for(lambda: client._calls.send(client._calls.artifacts.GetUpload, request).offset)
            raise Gone

        monkeypatch.setattr(stub, "WriteBlob", breaking)
        monkeypatch.setattr(BlockingCalls, "artifacts", property(lambda _: stub))
        told: list[int] = []
        digest = client.push_artifact({"file": tmp_path / "file"}, on_bytes=told.append)
        assert len(attempts) == 2
        assert sum(received) == len(data), "nothing was sent twice"
        assert sum(told) == len(data)
        client.pull_artifact(digest, tmp_path / "pulled")
        assert content(tmp_path / "pulled") == {"file": data}


class Gone(grpc.RpcError):
    """The connection is lost."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "gone"

    def trailing_metadata(self) -> tuple[()]:
        return ()


async def test_few_are_kept_and_not_for_long(tmp_path: Path) -> None:
    blobs, discarded = LocalBlobs(LocalStore(tmp_path)), []

    async def discard(writer: BlobWriter) -> None:
        writer.discard()
        discarded.append(writer)

    def begun() -> BlobWriter:
        writer = blobs.writer(FILE)
        writer.write(DATA[:10])
        return writer

    waiting = InterruptedUploads(discard, seconds=0.2, most=3, each=2)
    for principal, number in (("one", 1), ("one", 2), ("one", 3), ("two", 1), ("three", 1)):
        waiting.keep((principal, "red", str(number)), begun())
    found = [waiting.position((p, "red", n)) for p, n in (("one", "1"), ("one", "2"), ("one", "3"), ("two", "1"))]
    assert found == [0, 0, 10, 10], "the second of each beyond two, and the first of all beyond three"
    assert waiting.position(("three", "red", "1")) == 10
    assert waiting.take(("two", "red", "1"), offset=11, size_bytes=len(DATA)) is None
    assert waiting.take(("two", "red", "1"), offset=10, size_bytes=11) is None, "content of a digest has one size"
    taken = waiting.take(("two", "red", "1"), offset=10, size_bytes=len(DATA))
    assert taken is not None
    await asyncio.sleep(0.5)
    assert waiting.position(("one", "red", "3")) == 0
    assert len(discarded) == 4
    waiting.keep(("one", "red", "1"), taken)
    await waiting.close()
    assert not list((tmp_path / "uploads").iterdir())
