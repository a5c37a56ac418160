"""Artifacts through the coordinator: each project's own, whatever a client says of digests it learned of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipway.artifacts import LocalStore, Manifest, ManifestFile
from slipway.artifacts.digests import digest_bytes
from slipway.client import AsyncClient, Client
from slipway.client.artifacts import ProjectArtifacts
from slipway.client.calls import BlockingCalls
from slipway.errors import ModelExportError
from slipway_coordinator.transfers import TransferLimits
from slipway_protos.v1 import artifact_pb2 as pb
from support.coordinators.artifact_places import Place, content, create, listed, some_files, write
from support.coordinators.harness import CONFIGURATION, wait_for
from support.servers.tcp_proxy import TcpProxy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("artifacts")) as place:
        yield place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return some_files(tmp_path)


def reason(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelExportError) as caught:
        call()
    return caught.value.reason


def test_a_pull_makes_a_new_folder_or_none(place: Place, folder: Path, tmp_path: Path) -> None:
    def interrupt(_: int) -> None:
        raise KeyError

    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        (tmp_path / "theirs").mkdir()
        assert reason(lambda: client.pull_artifact(digest, tmp_path / "theirs")) == "OUTPUT_EXISTS"
        with pytest.raises(KeyError):
            client.pull_artifact(digest, tmp_path / "pulled", on_bytes=interrupt)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "theirs"]
        client.pull_artifact(digest, tmp_path / "pulled")
    assert content(tmp_path / "pulled") == content(folder)


def test_a_folder_goes_through_and_comes_back(place: Place, folder: Path, tmp_path: Path) -> None:
    brought: list[int] = []
    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder, on_bytes=brought.append)
        assert digest == LocalStore(tmp_path / "other").put_files({n: folder / n for n in content(folder)})
        assert sum(brought) == 3_200_000 + 5 + len(str(tmp_path))
        assert client.push_artifact(str(folder)) == digest
        client.pull_artifact(digest, str(tmp_path / "pulled"))
        files = client.get_artifact(digest).files
        assert digest in set(client.list_artifacts(page_size=1))
    assert content(tmp_path / "pulled") == content(folder)
    assert [file.path for file in files] == sorted(content(folder))
    with place.client_of("viewer") as viewer:
        viewer.pull_artifact(digest, tmp_path / "viewed", project="red")


def test_the_same_again_is_not_asked_for_again(place: Place, folder: Path) -> None:
    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        assert not create(client, listed(client, digest)).missing
        (folder / "own").write_text("another")
        changed = [
            file if file.path != "own" else ManifestFile("own", 7, digest_bytes(b"another"), file.media_type)
            for file in listed(client, digest)
        ]
        assert create(client, changed).missing == [digest_bytes(b"another")]


def test_another_projects_artifact_is_not_there(place: Place, folder: Path, tmp_path: Path) -> None:
    """To read, to list, to export from: in the words for what nobody has."""
    with place.client_of("submitter") as owner, place.client_of("neighbour") as other:
        digest = owner.push_artifact(folder)
        none = "sha256:" + "0" * 64
        answers = []
        for asked in (digest, none):
            with pytest.raises(ModelExportError) as caught:
                other.get_artifact(asked)
            answers.append((caught.value.reason, str(caught.value).replace(asked, "")))
            assert reason(lambda asked=asked: other.pull_artifact(asked, tmp_path / "x")) == "ARTIFACT_NOT_FOUND"
            assert reason(lambda asked=asked: other.get_artifact(asked, project="red")) == "ARTIFACT_NOT_FOUND"
            sources = {"base": asked, "adapter": asked}
            for only in (True, False):
                with pytest.raises(ModelExportError) as caught:
                    other.create_export(CONFIGURATION, sources=sources, validate_only=only)
                answers.append((caught.value.reason, str(caught.value).replace(asked, "")))
        assert len(set(answers)) == 1
        assert answers[0][0] == "ARTIFACT_NOT_FOUND"
        assert digest not in set(other.list_artifacts())
        assert reason(lambda: list(other.list_artifacts(project="red"))) == "PERMISSION_DENIED"
        # Never only its own: slipway cache gc keeps what is in this list, and removes the rest.
        assert reason(lambda: list(other.list_artifacts(project="-"))) == "PERMISSION_DENIED"


def test_who_learned_of_digests_has_to_bring_the_content(place: Place, folder: Path, tmp_path: Path) -> None:
    """A manifest of another project's digests gives nothing; the bytes themselves do, and they are compared."""
    with place.client_of("submitter") as owner, place.client_of("neighbour") as other:
        digest = owner.push_artifact(folder)
        files = listed(owner, digest)
        answer = create(other, files)
        assert answer.digest == digest
        assert set(answer.missing) == {file.digest for file in files}
        large = next(file for file in files if file.path == "large")
        for data in (b"", b"x" * large.size_bytes, b"x" * (large.size_bytes + 1)):
            assert write(other._calls, "blue", large, data) is grpc.StatusCode.INVALID_ARGUMENT
        assert write(other._calls, "red", large, (folder / "large").read_bytes()) is grpc.StatusCode.PERMISSION_DENIED
        assert set(create(other, files).missing) == {file.digest for file in files}
        assert reason(lambda: other.get_artifact(digest)) == "ARTIFACT_NOT_FOUND"
        assert other.push_artifact(folder) == digest
        other.pull_artifact(digest, tmp_path / "mine")
        owner.pull_artifact(digest, tmp_path / "theirs")
    wait_for(lambda: place.forgotten_uploads() == 0)
    assert content(tmp_path / "mine") == content(tmp_path / "theirs") == content(folder)


def test_roles(place: Place, folder: Path, tmp_path: Path) -> None:
    with place.client_of("submitter") as owner:
        digest = owner.push_artifact(folder)
    with place.client_of("viewer") as viewer:
        file = ManifestFile("x", 1, digest_bytes(b"x"), "")
        assert reason(lambda: viewer.push_artifact(folder, project="red")) == "PERMISSION_DENIED"
        assert write(viewer._calls, "red", file, b"x") is grpc.StatusCode.PERMISSION_DENIED
    with place.client_of("admin") as admin:
        admin.pull_artifact(digest, tmp_path / "a", project="green")
        assert digest in set(admin.list_artifacts(project="-"))
    with place.client_of("keyholder") as holder:
        sources = {"base": digest, "adapter": digest}
        holder.create_export(CONFIGURATION, sources=sources, export_id="from-the-store")
        assert reason(lambda: holder.get_artifact(digest, project="red")) == "ARTIFACT_NOT_FOUND"


TRICKS = ["../x", "/etc/passwd", "a/../b", "a\\b", "C:x", "a\nb", "", ".", "x" * 2000]


@pytest.mark.parametrize("path", TRICKS, ids=range(len(TRICKS)))
def test_paths_that_leave_the_artifact_are_refused(place: Place, path: str) -> None:
    with place.client_of("submitter") as client:
        for paths in ([path], ["fine", path]):
            entries = [ManifestFile(path, 1, digest_bytes(b"x"), "") for path in paths]
            assert reason(lambda entries=entries: create(client, entries)) == "ARTIFACT_INVALID"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([ManifestFile(f"f{n}", 1, digest_bytes(b"x"), "") for n in range(10_001)], "LIMIT_EXCEEDED"),
        ([ManifestFile("f", 1, digest_bytes(b"x"), "m" * 300)], "LIMIT_EXCEEDED"),
        ([ManifestFile("f", -1, digest_bytes(b"x"), "")], "ARTIFACT_INVALID"),
        ([ManifestFile("f", 1, "sha256:x", "")], "ARTIFACT_INVALID"),
        ([ManifestFile("f", 1, digest_bytes(b"x"), "")] * 2, "ARTIFACT_INVALID"),
        ([ManifestFile(n, size, digest_bytes(b"x"), "") for n, size in (("f", 9), ("g", 1))], "ARTIFACT_INVALID"),
        ([ManifestFile("f" * 500 + str(n), 1, digest_bytes(b"x"), "y" * 255) for n in range(9999)], "LIMIT_EXCEEDED"),
    ],
    ids=["many", "media-type", "size", "digest", "twice", "two-sizes", "bytes"],
)
def test_manifests_over_a_limit_are_refused(place: Place, files: list[ManifestFile], expected: str) -> None:
    with place.client_of("submitter") as client:
        assert reason(lambda: create(client, files)) == expected


def test_a_file_that_is_announced_as_too_large_is_refused_before_its_content(place: Place) -> None:
    with place.client_of("submitter") as client:
        for size, expected in (
            (1 << 62, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (1 << 36, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            assert write(client._calls, "red", ManifestFile("", size, digest_bytes(b"x"), ""), b"x") is expected, size


def test_damage_in_the_store_is_found_and_named(place: Place, folder: Path, tmp_path: Path) -> None:
    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        own = next(file for file in client.get_artifact(digest).files if file.path == "own")
        blob = place.store.blob_path(own.digest)
        blob.chmod(0o644)
        blob.write_bytes(b"y" * own.size_bytes)
        with pytest.raises(ModelExportError, match="own") as caught:
            client.pull_artifact(digest, tmp_path / "x")
        assert caught.value.reason == "ARTIFACT_CORRUPT"
        assert not blob.exists()
        assert client.push_artifact(folder) == digest  # which repairs it
        client.pull_artifact(digest, tmp_path / "again")
    assert content(tmp_path / "again") == content(folder)


def test_reading_goes_on_from_an_offset(place: Place, folder: Path) -> None:
    with place.client_of("submitter") as client:
        digest = client.push_artifact(folder)
        large = next(file for file in client.get_artifact(digest).files if file.path == "large")
        name = f"projects/red/artifacts/{digest}"

        def read(**fields: Any) -> bytes:
            request = pb.ReadBlobRequest(**{"name": name, "digest": large.digest} | fields)
            return b"".join(
                a.data for a in client._calls.artifacts.ReadBlob(request, metadata=client._calls.metadata())
            )

        assert read(offset=3_199_990) == (folder / "large").read_bytes()[3_199_990:]
        assert read(offset=3_200_000) == b""
        assert read(offset=7, limit=20) == (folder / "large").read_bytes()[7:27]
        assert read(limit=1) == b"0"
        assert read(offset=3_199_990, limit=1 << 62) == (folder / "large").read_bytes()[3_199_990:]
        assert read(limit=3_200_000) == (folder / "large").read_bytes()
        for fields, code in (
            ({"offset": 3_200_001}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"offset": -1}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"limit": -1}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"digest": "sha256:" + "0" * 64}, grpc.StatusCode.NOT_FOUND),
            ({"name": "projects/red/artifacts/x"}, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                read(**fields)
            assert caught.value.code() is code


def test_one_client_that_stalls_leaves_turns_to_others(place: Place, folder: Path, tmp_path: Path) -> None:
    """Uploads of one principal that never go on hold no more than its own turns, and nothing stays of them."""
    ended = threading.Event()

    def stalling(number: int) -> Iterator[pb.WriteBlobRequest]:
        yield pb.WriteBlobRequest(parent="projects/blue", digest=digest_bytes(b"%d" % number), size_bytes=9)
        ended.wait(30)

    with place.client_of("neighbour") as other, place.client_of("submitter") as client:
        calls = [
            other._calls.artifacts.WriteBlob.future(stalling(n), metadata=other._calls.metadata())
            for n in range(2 * TransferLimits().at_once)
        ]
        digest = client.push_artifact(folder)
        client.pull_artifact(digest, tmp_path / "x")
        for call in calls:
            call.cancel()
        ended.set()
    wait_for(lambda: not place.forgotten_uploads())


def test_a_cancelled_transfer_ends_soon(place: Place, folder: Path, tmp_path: Path) -> None:
    (folder / "larger").write_bytes(b"0123456789abcdef" * 4_000_000)
    begun, cancelled = threading.Event(), threading.Event()

    def tell(count: int) -> None:
        if count:
            begun.set()
            cancelled.wait(20)

    async def run() -> None:
        async with AsyncClient(place.address, security=place.security_of("submitter"), project="red") as client:
            transfer = asyncio.create_task(client.push_artifact(folder, on_bytes=tell))
            await asyncio.to_thread(begun.wait, 20)
            transfer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await transfer
            cancelled.set()

    asyncio.run(run())
    wait_for(lambda: not place.forgotten_uploads())
    large = place.store.blob_path(digest_bytes((folder / "larger").read_bytes()))
    assert not large.exists()
    with place.client_of("submitter", project="red") as client:
        client.push_artifact(folder)
    assert large.exists()
    wait_for(lambda: not place.forgotten_uploads())


def test_the_asyncio_client_has_the_same(place: Place, folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        security = place.security_of("submitter")
        async with AsyncClient(place.address, security=security, project="red") as client:
            digest = await client.push_artifact(folder)
            assert digest in [found async for found in client.list_artifacts()]
            assert (await client.get_artifact(digest)).digest == digest
            await client.pull_artifact(digest, tmp_path / "pulled")

    asyncio.run(run())
    assert content(tmp_path / "pulled") == content(folder)


def test_a_transfer_goes_on_when_the_connection_is_lost(place: Place, folder: Path, tmp_path: Path) -> None:
    (folder / "larger").write_bytes(b"0123456789abcdef" * 2_000_000)
    host, _, port = place.address.partition(":")
    security = place.security_of("submitter")
    with TcpProxy(lambda: (host, int(port))) as proxy:
        cuts = {"push": 0, "pull": 0}

        def cutting(what: str) -> Callable[[int], None]:
            done = 0

            def tell(count: int) -> None:
                nonlocal done
                done += count
                if done > 10_000_000 and cuts[what] == 0:
                    cuts[what] += 1
                    proxy.cut()

            return tell

        with Client(proxy.address, security=security, project="red") as client:
            digest = client.push_artifact(folder, on_bytes=cutting("push"))
            client.pull_artifact(digest, tmp_path / "pulled", on_bytes=cutting("pull"))
    assert cuts == {"push": 1, "pull": 1}
    assert content(tmp_path / "pulled") == content(folder)


def test_a_coordinator_that_is_away_after_the_content_was_brought_is_waited_for(place: Place, folder: Path) -> None:
    host, _, port = place.address.partition(":")
    there = threading.Event()
    there.set()

    class Interrupted(ProjectArtifacts):
        """Nobody answers any more when the artifact of what was brought is to be made; somebody does a little later."""

        requests = 0

        def _request(self, manifest: Manifest) -> pb.CreateArtifactRequest:
            self.requests += 1
            if self.requests == 2:
                there.clear()
                proxy.cut()
                threading.Timer(0.5, there.set).start()
            return super()._request(manifest)

    with (
        TcpProxy(lambda: (host, int(port)) if there.is_set() else None) as proxy,
        BlockingCalls(proxy.address, security=place.security_of("submitter")) as calls,
    ):
        artifacts = Interrupted(calls, "red")
        digest = artifacts.put(folder)
        assert artifacts.requests >= 2
        assert artifacts.exists(digest)
