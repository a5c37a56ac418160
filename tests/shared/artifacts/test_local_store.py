"""The local artifact store: identity, verification, safety, collection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipway.artifacts import ActionResult, LocalStore, Manifest, ManifestFile
from slipway.artifacts.collection import collect
from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.opening import blobs_of
from slipway.errors import ArtifactError


def folder_of(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_committing_makes_no_second_copy(store: LocalStore, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "a", {"weights": "w" * 1000})
    inode = (source / "weights").stat().st_ino
    digest = store.put(source)
    fetched = store.fetch(digest, tmp_path / "out")
    assert (fetched / "weights").stat().st_ino == inode


def test_a_changed_original_is_noticed(store: LocalStore, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "a", {"weights": "before"}) / "weights"
    digest = store.put_files({"weights": source})
    time.sleep(0.01)
    source.write_text("after!")
    try:
        assert (store.fetch(digest, tmp_path / "out") / "weights").read_text() == "before"  # cloned or copied
    except ArtifactError as error:
        assert error.reason == "ARTIFACT_CORRUPT"  # hard-linked


def test_what_was_verified_through_one_store_is_not_read_again_through_another(
    store: LocalStore, tmp_path: Path
) -> None:
    digest = store.put(folder_of(tmp_path / "a", {"weights": "w" * 1000}))
    read: list[int] = []
    LocalStore(store.root).fetch(digest, tmp_path / "out", on_bytes=read.append)
    assert not read
    blob = store.blob_path(digest_bytes(b"w" * 1000))
    blob.chmod(0o644)
    time.sleep(0.01)
    blob.write_text("v" * 1000)
    with pytest.raises(ArtifactError) as raised:
        LocalStore(store.root).fetch(digest, tmp_path / "again")
    assert raised.value.reason == "ARTIFACT_CORRUPT"


def test_a_corrupt_manifest_is_no_artifact(store: LocalStore, tmp_path: Path) -> None:
    digest = store.put(folder_of(tmp_path / "a", {"x": "1"}))
    path = store.manifest_path(digest)
    path.write_bytes(path.read_bytes().replace(b'"x"', b'"y"'))
    with pytest.raises(ArtifactError) as raised:
        store.manifest(digest)
    assert raised.value.reason == "ARTIFACT_CORRUPT"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a//b", "./x", "a\\..\\x", "x\0y"])
def test_manifests_cannot_point_outside(path: str) -> None:
    entry = ManifestFile(path=path, size_bytes=0, digest="sha256:" + "0" * 64, media_type="text/plain")
    with pytest.raises(ArtifactError) as raised:
        Manifest.of([entry])
    assert raised.value.reason == "ARTIFACT_INVALID"
    document = {"version": 1, "files": [{"path": path, "size_bytes": 0, "digest": entry.digest, "media_type": ""}]}
    with pytest.raises(ArtifactError):
        Manifest.from_bytes(json.dumps(document).encode())


def test_a_full_disk_leaves_nothing_half_written(small_disk: Path, tmp_path: Path) -> None:
    store = LocalStore(small_disk / "store")
    big = tmp_path / "big"
    big.mkdir()
    (big / "weights").write_bytes(os.urandom(16 << 20))
    with pytest.raises(ArtifactError) as raised:
        store.put(big)
    assert raised.value.reason == "DISK_FULL"
    assert store.digests() == []
    assert [p for p in store.root.rglob("*") if p.is_file() and p.name != "lock"] == []


def test_collection_removes_the_least_recently_used_and_what_only_it_had(store: LocalStore, tmp_path: Path) -> None:
    old = store.put(folder_of(tmp_path / "a", {"shared": "s" * 10, "own": "o" * 100}))
    new = store.put(folder_of(tmp_path / "b", {"shared": "s" * 10, "mine": "m" * 50}))
    os.utime(store.manifest_path(old), (1, 1))
    store.record_action("0" * 64, ActionResult({"out": old}))
    planned = collect(store, max_bytes=100, dry_run=True)
    assert planned.artifacts == (old,)
    assert store.exists(old)
    done = collect(store, max_bytes=100)
    assert (done.artifacts, done.blobs, done.freed_bytes) == ((old,), 1, 100)
    assert not store.exists(old)
    assert store.exists(new)
    assert list((store.root / "actions").rglob("*.json")) == []


def test_collecting_is_no_use_of_what_is_kept(store: LocalStore, tmp_path: Path) -> None:
    digest = store.put(folder_of(tmp_path / "a", {"x": "1"}))
    store.record_action("0" * 64, ActionResult({"out": digest}))
    os.utime(store.manifest_path(digest), (1, 1))
    assert collect(store, keep=lambda: [digest]).artifacts == ()
    assert store.last_used(digest) == 1
    assert collect(store, max_age_seconds=60).artifacts == (digest,)


def test_an_error_while_reading_stops_the_other_files_too(store: LocalStore, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"")
        os.truncate(tmp_path / name, 1 << 40)  # sparse: reading it all would take many minutes
    started = time.monotonic()

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put_files({"a": tmp_path / "a", "b": tmp_path / "b"}, on_bytes=interrupt)
    assert time.monotonic() - started < 60
    assert store.digests() == []


def test_collection_keeps_what_it_is_told_to(store: LocalStore, tmp_path: Path) -> None:
    digest = store.put(folder_of(tmp_path / "a", {"x": "1"}))
    os.utime(store.manifest_path(digest), (1, 1))
    assert collect(store, max_age_seconds=60, keep=lambda: [digest]).artifacts == ()
    assert collect(store, max_age_seconds=60).artifacts == (digest,)


WRITER = """
import sys
from pathlib import Path
from slipway.artifacts import LocalStore
store = LocalStore(Path(sys.argv[1]))
for n in range(40):
    folder = Path(sys.argv[2]) / str(n)
    folder.mkdir(parents=True)
    (folder / "same").write_text(f"content {n}")
    (folder / "common").write_text("common")
    print(store.put(folder), flush=True)
"""


def test_several_processes_write_the_same_artifacts_while_one_collects(store: LocalStore, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(store.root)]
    writers = [
        subprocess.Popen([*command, str(tmp_path / name)], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b", "c")
    ]
    while any(writer.poll() is None for writer in writers):
        collect(store, max_age_seconds=3600)
        time.sleep(0.02)
    digests = [writer.communicate()[0].split() for writer in writers]
    assert all(writer.returncode == 0 for writer in writers)
    assert digests[0] == digests[1] == digests[2]
    for n, digest in enumerate(digests[0]):
        assert (store.fetch(digest, tmp_path / "out" / str(n)) / "same").read_text() == f"content {n}"


def test_a_small_file_of_others_may_be_changed_and_locked_away(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    source = tmp_path / "config.json"
    source.write_text("{}")
    digest = store.put_files({"config.json": source})
    source.write_text("[]")
    source.chmod(0o000)
    fetched = LocalStore(store.root).fetch(digest, tmp_path / "out") / "config.json"
    assert fetched.read_text() == "{}"
    assert fetched.stat().st_mode & 0o400


@pytest.mark.parametrize("step", ["chmod", "lstat"])
def test_a_file_that_a_collection_takes_while_it_arrives_is_asked_for_again(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "weights").write_bytes(b"www")
    file, real = ManifestFile("weights", 3, digest_bytes(b"www"), ""), getattr(Path, step)

    def collected_before(path: Path, *more: int) -> object:
        if path.parent.name == "uploads":
            path.unlink()
        return real(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, step, collected_before)
        with pytest.raises(ArtifactError) as caught:
            blobs_of(store).keep(file, tmp_path / "weights", on_bytes=lambda _: None)
    assert (caught.value.reason, caught.value.retryable) == ("STORE_UNAVAILABLE", True)
    with pytest.raises(FileNotFoundError):
        blobs_of(store).keep(file, tmp_path / "none", on_bytes=lambda _: None)


def test_content_that_was_collected_before_its_artifact_was_made_is_asked_for_again(store: LocalStore) -> None:
    blobs = blobs_of(store)
    file = ManifestFile("weights", 3, digest_bytes(b"www"), "")
    for _ in range(2):
        writer = blobs.writer(file)
        writer.write(b"www")
        writer.commit()
        assert blobs.has_blob(file)
        if collect(store).blobs:  # the first time only: nothing names it yet
            with pytest.raises(ArtifactError) as caught:
                blobs.admit(Manifest.of([file]))
            assert caught.value.reason == "STORE_UNAVAILABLE"
            assert not blobs.exists(Manifest.of([file]).digest)
    blobs.admit(Manifest.of([file]))
    assert blobs.exists(Manifest.of([file]).digest)
