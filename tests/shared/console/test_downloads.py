"""An artifact as a tar: its size is known before, and what is unpacked is the artifact."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore, Manifest, ManifestFile
from slipway.artifacts.blobs import LocalBlobs
from slipway.console.downloads import tar_bytes, tar_of
from slipway.errors import ArtifactError

LONG = "/".join(["a-folder-with-a-name-of-some-length"] * 7) + "/ümläut.txt"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def stored(store: LocalStore, folder: Path, **files: bytes) -> str:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return store.put_files({str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()})


def test_what_is_unpacked_is_the_artifact(store: LocalStore, tmp_path: Path) -> None:
    contents = {"empty": b"", "block": b"b" * 512, "model.safetensors": bytes(range(256)) * 20_001, LONG: b"text"}
    for name, content in contents.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    digest = store.put_files({name: tmp_path / "in" / name for name in contents})
    manifest, blobs = store.manifest(digest), LocalBlobs(store)
    data = b"".join(tar_of(manifest, "gguf-q8_0", lambda file: blobs.read(file, digest)))
    assert len(data) == tar_bytes(manifest, "gguf-q8_0")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]
        modes = {each.mode for each in archive}
    assert found == {f"gguf-q8_0/{name}": content for name, content in contents.items()}
    assert modes == {0o644}


def test_the_size_of_files_that_a_header_cannot_count_in_octal_is_known_too() -> None:
    manifest = Manifest.of([ManifestFile("model.safetensors", 9 << 30, "sha256:" + "1" * 64, "")])
    assert (9 << 30) < tar_bytes(manifest, "x") < (9 << 30) + (32 << 10)


def test_content_that_is_damaged_ends_the_download(store: LocalStore, tmp_path: Path) -> None:
    digest = stored(store, tmp_path / "in", model=b"right")
    manifest = store.manifest(digest)
    blob = store.blob_path(manifest.files[0].digest)
    blob.chmod(0o644)
    blob.write_bytes(b"wrong")
    with pytest.raises(ArtifactError) as caught:
        list(tar_of(manifest, "x", lambda file: LocalBlobs(store).read(file, digest)))
    assert caught.value.reason == "ARTIFACT_CORRUPT"
