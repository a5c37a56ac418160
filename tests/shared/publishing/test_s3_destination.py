"""Publishing to a bucket of a real S3 server: the files as they are, the list of checksums last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.artifacts.s3.client import S3Bucket
from slipway.errors import ArtifactError, ModelExportError
from slipway.files.checksums import MANIFEST, write_checksums
from slipway.publishing.destination import Access
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.publisher import publish
from slipway.publishing.s3 import S3Destination
from slipway.publishing.verification import check_folder
from support.commands.delivered_folders import files_below, make_delivered
from support.servers.s3_server import BUCKET, READER_KEY, READER_SECRET, S3Server


@pytest.fixture
def bucketed(access: Access, s3: S3Server) -> Access:
    return replace(access, settings=access.settings.model_copy(update={"s3": s3.options()}))


def objects(s3: S3Server, prefix: str) -> dict[str, bytes]:
    bucket = S3Bucket(s3.options(), BUCKET, prefix=prefix)
    return {entry.key: bucket.get(entry.key) for entry in bucket.listing()}


def test_a_bucket_has_the_files_as_they_are(s3: S3Server, folder: Path, bucketed: Access, tmp_path: Path) -> None:
    done = publish(folder, [f"s3://{BUCKET}/published/plain"], access=bucketed)
    assert done.destinations[0].address == f"s3://{BUCKET}/published/plain"
    assert objects(s3, "published/plain") == files_below(folder)
    for name, data in objects(s3, "published/plain").items():
        (tmp_path / "back" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / name).write_bytes(data)
    assert check_folder(tmp_path / "back").verdict == "passed"


def test_a_large_file_is_sent_in_parts_with_its_digest(
    s3: S3Server, tmp_path: Path, bucketed: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.artifacts.s3.transfer.PART_BYTES", 5 << 20)  # the least that the protocol allows
    folder = make_delivered(tmp_path / "large", size=11 << 20)
    publish(folder, [f"s3://{BUCKET}/published/large"], access=bucketed)
    found = S3Bucket(s3.options(), BUCKET, prefix="published/large").find("onnx-int4/model.onnx")
    assert found is not None
    assert found.sha256 == hashlib.sha256((folder / "onnx-int4" / "model.onnx").read_bytes()).hexdigest()
    again = publish(folder, [f"s3://{BUCKET}/published/large"], access=bucketed).destinations[0]
    assert again.sent_bytes == 0


def test_only_what_changed_is_sent_and_what_is_gone_is_removed(s3: S3Server, tmp_path: Path, bucketed: Access) -> None:
    url = f"s3://{BUCKET}/published/again"
    first = make_delivered(tmp_path / "first")
    (first / MANIFEST).unlink()
    (first / "gguf-q4_k_m" / "old.txt").write_text("only in the first")
    write_checksums(first, known={})
    publish(first, [url], access=bucketed)
    second = make_delivered(tmp_path / "second", size=3100)
    S3Bucket(s3.options(), BUCKET, prefix="published/again").put("of others.txt", b"kept")
    done = publish(second, [url], access=bucketed).destinations[0]
    assert done.kept_bytes > 0
    assert objects(s3, "published/again") == files_below(second) | {"of others.txt": b"kept"}


def test_an_interruption_leaves_no_list_and_is_continued(
    s3: S3Server, folder: Path, bucketed: Access, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/published/interrupted"
    publish(folder, [url], access=bucketed, key=keys[0])
    other = make_delivered(tmp_path / "other", size=3100)
    sent: list[int] = []

    def show(_: int) -> Callable[[int], None]:
        def count(size: int) -> None:
            sent.append(size)
            if len(sent) > hashed + 4:
                raise KeyboardInterrupt

        return count

    hashed = len(files_below(other))
    with pytest.raises(KeyboardInterrupt):
        publish(other, [url], access=bucketed, show=show)
    assert MANIFEST not in objects(s3, "published/interrupted")
    publish(other, [url], access=bucketed)
    now = objects(s3, "published/interrupted")
    assert now == files_below(other)
    assert SIGNATURE not in now  # the signature was of the first


def test_something_else_is_not_replaced(s3: S3Server, folder: Path, bucketed: Access) -> None:
    bucket = S3Bucket(s3.options(), BUCKET, prefix="published/else")
    bucket.put(MANIFEST, b"a list of something else\n")
    with pytest.raises(ArtifactError) as caught:
        publish(folder, [f"s3://{BUCKET}/published/else"], access=bucketed)
    assert caught.value.reason == "OUTPUT_EXISTS"
    assert bucket.get(MANIFEST) == b"a list of something else\n"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"s3://{BUCKET}/published/denied", "STORE_DENIED"),
        ("s3://x", "STORE_INVALID"),
        ("s3://absent-bucket/x", "STORE_INVALID"),
    ],
)
def test_a_bucket_that_cannot_be_written_is_named(
    s3: S3Server, folder: Path, access: Access, url: str, reason: str
) -> None:
    options = s3.options(access_key=READER_KEY, secret_key=READER_SECRET) if "denied" in url else s3.options()
    reader = replace(access, settings=access.settings.model_copy(update={"s3": options}))
    with pytest.raises(ModelExportError) as caught:
        publish(folder, [url], access=reader)
    assert caught.value.reason == reason
    assert READER_SECRET not in str(caught.value)


def test_connections_are_closed(bucketed: Access) -> None:
    destination = S3Destination(f"s3://{BUCKET}/x", bucketed)
    destination.close()
    with pytest.raises(RuntimeError):
        destination._pool.submit(print)
