"""Files of inputs that become files of an output: no store writes or sends their content again."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.artifacts.adopting import adopted_files
from slipway.artifacts.cached import CachedStore
from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.s3.client import S3Bucket
from slipway.artifacts.s3.store import S3Store
from slipway.errors import ArtifactError, StageError
from slipway.parts import Adopted

WEIGHTS = b"weights" * 1000


def folder(place: Path, **files: bytes) -> Path:
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def part(store: LocalStore, tmp_path: Path) -> str:
    return store.put(folder(tmp_path / "part", weights=WEIGHTS, small=b"small"))


def adopt(path: str = "weights", content: bytes = WEIGHTS) -> list[Adopted]:
    return [Adopted("part-001", path, digest_bytes(content))]


def test_the_artifact_is_that_of_a_folder_with_all_files(store: LocalStore, part: str, tmp_path: Path) -> None:
    entries = adopted_files(store, {"part-001": part}, adopt())
    joined = store.put(folder(tmp_path / "joined", index=b"index"), adopted=entries)
    other = LocalStore(tmp_path / "other")
    assert joined == other.put(folder(tmp_path / "whole", index=b"index", weights=WEIGHTS))
    assert (store.fetch(joined, tmp_path / "fetched") / "weights").read_bytes() == WEIGHTS


def test_files_that_are_left_out_are_neither_fetched_nor_read(store: LocalStore, part: str, tmp_path: Path) -> None:
    blob = store.blob_path(digest_bytes(WEIGHTS))
    blob.chmod(0o644)
    blob.write_bytes(b"damaged" * 1000)
    fetched = store.fetch(part, tmp_path / "fetched", leave_out=("weights",))
    assert [path.name for path in fetched.iterdir()] == ["small"]
    assert blob.exists(), "a damaged file is found by those who read it"


@pytest.mark.parametrize(("path", "content"), [("weights", b"others"), ("missing", WEIGHTS)])
def test_a_file_of_other_content_is_refused(store: LocalStore, part: str, path: str, content: bytes) -> None:
    with pytest.raises(StageError) as refused:
        adopted_files(store, {"part-001": part}, adopt(path, content))
    assert refused.value.reason == "RESULT_INVALID"


def test_a_lost_file_names_the_part_to_make_again(store: LocalStore, part: str, tmp_path: Path) -> None:
    entries = adopted_files(store, {"part-001": part}, adopt())
    store.blob_path(digest_bytes(WEIGHTS)).unlink()
    with pytest.raises(ArtifactError) as lost:
        adopted_files(store, {"part-001": part}, adopt())
    assert (lost.value.reason, lost.value.about["digest"]) == ("ARTIFACT_NOT_FOUND", part)
    with pytest.raises(ArtifactError) as late:
        store.put(folder(tmp_path / "joined", index=b"index"), adopted=entries)
    assert late.value.reason == "ARTIFACT_NOT_FOUND"


def test_a_bucket_gets_no_content_again_and_sends_none(bucket: S3Bucket, tmp_path: Path) -> None:
    remote = S3Store(bucket)
    part = CachedStore(remote, LocalStore(tmp_path / "one")).put(
        folder(tmp_path / "part", weights=WEIGHTS, small=b"small")
    )
    sent = {entry.key: entry.modified for entry in bucket.listing("blobs/")}
    other = CachedStore(remote, LocalStore(tmp_path / "other"))
    fetched = other.fetch(part, tmp_path / "fetched", leave_out=("weights",))
    assert [path.name for path in fetched.iterdir()] == ["small"]
    entries = adopted_files(other, {"part-001": part}, adopt())
    moved: list[int] = []
    joined = other.put(folder(tmp_path / "joined", index=b"index"), adopted=entries, on_bytes=moved.append)
    assert sum(moved) < len(WEIGHTS)
    assert not other.local.blob_path(digest_bytes(WEIGHTS)).exists()
    after = {entry.key: entry.modified for entry in bucket.listing("blobs/")}
    assert {key: after[key] for key in sent} == sent
    assert (other.fetch(joined, tmp_path / "whole") / "weights").read_bytes() == WEIGHTS, "a reader gets all of it"
