"""What every artifact store does alike: in a folder, in a bucket, and in a bucket behind a cache."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import ActionResult, LocalStore
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.artifacts.store import ArtifactStore
from slipway.errors import ArtifactError
from support.servers.s3_server import BUCKET, S3Server


def folder_of(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.fixture(params=["local", "s3", "cached"])
def store(request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path) -> ArtifactStore:
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    remote = S3Store(S3Bucket(s3.options(), BUCKET, prefix=uuid.uuid4().hex))
    return remote if request.param == "s3" else CachedStore(remote, LocalStore(tmp_path / "store"))


def test_the_same_files_are_the_same_artifact_wherever_they_lie(store: ArtifactStore, tmp_path: Path) -> None:
    files = {"config.json": "{}", "deep/er/weights.safetensors": "w"}
    first = store.put(folder_of(tmp_path / "a", files))
    second = store.put(folder_of(tmp_path / "b", dict(reversed(files.items()))))
    assert first == second
    assert store.manifest(first).size_bytes == 3
    other = store.put(folder_of(tmp_path / "c", {"config.json": "{}", "deep/er/weights2.safetensors": "w"}))
    assert other != first


def test_what_is_fetched_is_what_was_put(store: ArtifactStore, tmp_path: Path) -> None:
    digest = store.put(folder_of(tmp_path / "a", {"x": "1", "y/z": "2"}))
    fetched = store.fetch(digest, tmp_path / "out")
    assert {p.relative_to(fetched).as_posix(): p.read_text() for p in fetched.rglob("*") if p.is_file()} == {
        "x": "1",
        "y/z": "2",
    }


def test_files_of_others_keep_their_mode(store: ArtifactStore, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "a", {"weights": "w"}) / "weights"
    source.chmod(0o640)
    store.put_files({"model/weights": source})
    assert source.stat().st_mode & 0o777 == 0o640


def test_links_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", {"x": "1"})
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(ArtifactError, match="link"):
        store.put(folder)


@pytest.mark.parametrize("digest", ["", "sha256:", "sha256:" + "g" * 64, "../../etc/passwd", "md5:" + "0" * 32])
def test_what_is_not_a_digest_is_refused(store: ArtifactStore, digest: str) -> None:
    with pytest.raises(ArtifactError):
        store.manifest(digest)


def blobs_of(store: Any) -> list[tuple[Any, str]]:
    """Ways to reach the stored blobs behind the store's back, with their names."""
    if isinstance(store, LocalStore):
        return [(store, str(path)) for path in sorted((store.root / "blobs").rglob("*")) if path.is_file()]
    bucket = store.bucket if isinstance(store, S3Store) else store.remote.bucket
    return [(bucket, entry.key) for entry in bucket.listing("blobs/")]


def change(place: Any, name: str, data: bytes | None) -> None:
    """Overwrite a blob, or remove it."""
    if isinstance(place, S3Bucket):
        place.delete([name]) if data is None else place.put(name, data)
        return
    Path(name).unlink()
    if data is not None:
        Path(name).write_bytes(data)


def test_corruption_is_found_named_removed_and_repaired(store: ArtifactStore, tmp_path: Path) -> None:
    if isinstance(store, CachedStore):
        store = store.remote  # the cache repairs itself from it
    files = {"config.json": "{}", "weights": "a" * 100}
    digest = store.put(folder_of(tmp_path / "a", files))
    for place, name in blobs_of(store):
        change(place, name, b"a" * 99 + b"b")
    with pytest.raises(ArtifactError, match=r"config\.json|weights") as raised:
        (LocalStore(store.root) if isinstance(store, LocalStore) else store).fetch(digest, tmp_path / "out")
    assert raised.value.reason == "ARTIFACT_CORRUPT"
    assert raised.value.about["digest"] == digest
    assert not store.exists(digest)
    assert len(blobs_of(store)) < 2
    for place, name in blobs_of(store):
        change(place, name, None)
    assert store.put(folder_of(tmp_path / "b", files)) == digest
    store.fetch(digest, tmp_path / "again")


def test_actions_are_forgotten_with_their_outputs(store: ArtifactStore, tmp_path: Path) -> None:
    digest = store.put(folder_of(tmp_path / "a", {"x": "1"}))
    key = "0" * 64
    assert store.action(key) is None
    store.record_action(key, ActionResult({"out": digest}, {"n": 1}))
    assert store.action(key) == ActionResult({"out": digest}, {"n": 1})
    for place, name in blobs_of(store):
        change(place, name, None)
    assert store.action(key) is None


def test_files_with_the_same_content_and_empty_ones(store: ArtifactStore, tmp_path: Path) -> None:
    digest = store.put(folder_of(tmp_path / "a", {"x": "same", "y": "same", "empty": "", "none": ""}))
    out = store.fetch(digest, tmp_path / "out")
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "x": "same",
        "y": "same",
        "empty": "",
        "none": "",
    }
    assert store.manifest(digest).size_bytes == 8


def test_what_is_missing_is_said_to_be(store: ArtifactStore, tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    assert not store.exists(digest)
    with pytest.raises(ArtifactError) as raised:
        store.fetch(digest, tmp_path / "out")
    assert raised.value.reason == "ARTIFACT_NOT_FOUND"
    assert not (tmp_path / "out").exists()


def test_a_transfer_can_be_stopped(store: ArtifactStore, tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyError("stopped")

    with pytest.raises(KeyError):
        store.put(folder_of(tmp_path / "a", {"x": "1" * 100}), on_bytes=stop)
    digest = store.put(folder_of(tmp_path / "b", {"x": "1" * 100}))
    assert store.exists(digest)
