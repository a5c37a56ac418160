"""Folders that people push: nothing is left out without a word; and work on many files, which one failure ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from slipway.artifacts.blobs import LocalBlobs
from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.files import folder_files, in_threads, pull
from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import ManifestFile
from slipway.errors import ArtifactError, StageError
from support.coordinators.artifact_places import Place


def link_to_nothing(path: Path) -> None:
    path.symlink_to("gone")


def link_to_a_folder(path: Path) -> None:
    path.symlink_to(path.parent)


@pytest.mark.parametrize("make", [link_to_nothing, link_to_a_folder, os.mkfifo])
def test_what_no_artifact_holds_is_not_left_out_silently(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "weights").write_text("w")
    make(tmp_path / "odd")
    with pytest.raises(ArtifactError, match="odd") as raised:
        folder_files(tmp_path)
    assert raised.value.reason == "ARTIFACT_INVALID"


def test_a_folder_that_cannot_be_read_is_not_left_out_silently() -> None:
    nobody = 65534  # root may read everything
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "weights").write_text("w")
        (folder / "closed").mkdir(0)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(nobody)
            with pytest.raises(ArtifactError, match=r"closed cannot be read: Permission denied") as raised:
                folder_files(folder)
        finally:
            os.seteuid(user)
            (folder / "closed").chmod(0o700)
    assert raised.value.reason == "FILE_ERROR"


def test_what_somebody_puts_where_an_artifact_is_being_pulled_to_stays(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("w")
    store, target = LocalStore(tmp_path / "store"), tmp_path / "pulled"
    digest = store.put_files({"weights": tmp_path / "weights"})
    os.utime(store.blob_path(digest_bytes(b"w")), (0, 0))  # so that it is read again

    def meanwhile(_: int) -> None:
        target.mkdir(exist_ok=True)
        (target / "mine").write_text("m")

    with pytest.raises(ArtifactError) as raised:
        pull(store, digest, target, on_bytes=meanwhile)
    assert raised.value.reason == "OUTPUT_EXISTS"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pulled", "store", "weights"]
    assert (target / "mine").read_text() == "m"


def test_the_first_failure_ends_work_that_began_earlier() -> None:
    stopped = threading.Event()

    def work(item: str, count: Callable[[int], None]) -> None:
        if item == "refused":
            raise KeyError(item)
        for _ in range(3_000):
            try:
                count(0)
            except StageError:
                stopped.set()
                raise
            stopped.wait(0.01)

    with pytest.raises(KeyError):
        in_threads(work, ["large", "refused"], None)
    assert stopped.is_set()


def test_the_end_of_a_file_that_a_full_disk_does_not_take_is_missed(small_disk: Path, tmp_path: Path) -> None:
    data = os.urandom(9 << 20)  # in one piece, of which the disk takes 8 MiB and says so only in what write returns
    blobs = LocalBlobs(LocalStore(small_disk / "store"))
    writer = blobs.writer(ManifestFile("x", len(data), digest_bytes(data), ""))
    with pytest.raises(ArtifactError) as raised:
        writer.write(data)
    writer.discard()
    assert raised.value.reason == "DISK_FULL"

    (small_disk / "filling").write_bytes(bytes(512 << 10))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "weights").write_bytes(data[: 8 << 20])  # its last piece does not fit
    with Place(tmp_path) as place, place.client_of("submitter") as client:
        digest = client.push_artifact(tmp_path / "folder")
        with pytest.raises(ArtifactError) as raised:
            client.pull_artifact(digest, small_disk / "pulled")
    assert raised.value.reason == "DISK_FULL"
