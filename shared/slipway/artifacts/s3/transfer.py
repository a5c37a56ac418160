"""Transfer files to and from a bucket in parts, several at a time, with bounded memory.

Each worker holds one outgoing part in memory, because a part is signed before it is sent. Incoming parts are written to their place
in the file as they arrive, and hashed right after while their pages are still cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

from minio.datatypes import Part
from minio.error import MinioException, S3Error

from slipway.artifacts.files import cancel, gather
from slipway.artifacts.s3.client import S3_EXCEPTIONS, SHA256, WORKERS, Metadata, S3Bucket, is_missing
from slipway.artifacts.store import OnBytes
from slipway.errors import ArtifactError
from slipway.observability import metrics

PART_BYTES = 64 << 20
_MOST_PARTS = 10_000  # limit of the S3 protocol
_READ_BYTES = 1 << 20


def upload(
    bucket: S3Bucket,
    name: str,
    file: BinaryIO,
    size: int,
    *,
    pool: ThreadPoolExecutor,
    on_bytes: OnBytes,
    sha256: str = "",
) -> None:
    """Upload an open file; the object appears once it is complete.

    Args:
        bucket: The target.
        name: Name of the object.
        file: Read at given positions by several threads; its own position does not matter.
        size: Size of the file in bytes.
        pool: Workers; each holds one part in memory.
        on_bytes: Gets the size of each part once it is stored.
        sha256: The file's digest in hexadecimal, for the object's metadata; empty adds none.

    Raises:
        ArtifactError: As :meth:`S3Bucket.call`.
    """
    part_bytes = max(PART_BYTES, math.ceil(size / _MOST_PARTS))
    if size <= part_bytes:
        pool.submit(_put_whole, bucket, name, file, size, sha256=sha256).result()
        on_bytes(size)
        return
    key, doing = bucket.key(name), f"uploading {name}"
    headers: Metadata = {f"x-amz-meta-{SHA256}": sha256} if sha256 else {}
    upload_id: str = bucket.call(doing, lambda: bucket.sdk._create_multipart_upload(bucket.bucket, key, headers))

    def send(number: int) -> Part:
        on_bytes(0)
        offset = number * part_bytes
        data = _read_at(file, offset, min(part_bytes, size - offset))
        etag = bucket.call(
            doing,
            lambda: bucket.sdk._upload_part(bucket.bucket, key, data, None, upload_id, number + 1),
        )
        metrics.STORE_BYTES.add(len(data), direction="sent")
        on_bytes(len(data))
        return Part(number + 1, etag)

    sending = [pool.submit(send, number) for number in range(math.ceil(size / part_bytes))]
    try:
        parts = gather(sending)
    except BaseException:
        _stop(sending)
        with contextlib.suppress(*S3_EXCEPTIONS):  # the bucket's lifecycle rule expires an abandoned upload
            bucket.sdk._abort_multipart_upload(bucket.bucket, key, upload_id)
        raise
    bucket.call(doing, lambda: complete(bucket, name, upload_id, parts, size))


def download(
    bucket: S3Bucket, name: str, size: int, target: Path, *, pool: ThreadPoolExecutor, on_bytes: OnBytes
) -> str:
    """Write an object of known size into a new file; return the digest of the bytes received.

    A shorter object gives the digest of its actual bytes, which is not the expected one.

    Raises:
        ArtifactError: ``ARTIFACT_NOT_FOUND``, ``DISK_FULL``, and as :meth:`S3Bucket.call`.
    """
    sha = hashlib.sha256()
    with target.open("x+b") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)  # fail now on a full disk, and avoid fragments
        parts = [
            pool.submit(_receive, bucket, name, file, range(start, min(start + PART_BYTES, size)), on_bytes)
            for start in range(0, size, PART_BYTES)
        ]
        try:
            for part in parts:
                for data in _read_back(file, *part.result()):
                    sha.update(data)
        except BaseException:
            _stop(parts)
            raise
    return f"sha256:{sha.hexdigest()}"


def workers() -> ThreadPoolExecutor:
    """Return the threads that carry data; each holds at most one part."""
    return ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="slipway-transfer")


def _stop(futures: Sequence[Future[Any]]) -> None:
    cancel(futures)
    wait(futures)


def _put_whole(bucket: S3Bucket, name: str, file: BinaryIO, size: int, *, sha256: str) -> None:
    bucket.put(name, _read_at(file, 0, size), sha256=sha256)


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Return exactly these bytes of a file.

    Raises:
        ArtifactError: ``FILE_ERROR`` if it has become shorter.
    """
    data = os.pread(file.fileno(), length, offset)
    while len(data) < length:  # one read returns at most 2 GiB
        more = os.pread(file.fileno(), length - len(data), offset + len(data))
        if not more:
            raise ArtifactError(f"{file.name} became shorter while it was read", reason="FILE_ERROR")
        data += more
    return data


def complete(bucket: S3Bucket, name: str, upload_id: str, parts: list[Part], size: int) -> None:
    """Complete an upload; if the service no longer knows it, check whether an earlier call completed it."""
    try:
        bucket.sdk._complete_multipart_upload(bucket.bucket, bucket.key(name), upload_id, parts)
    except MinioException as error:
        stored = bucket.find(name) if is_missing(error) else None
        if stored is None or stored.size_bytes != size:
            raise


def _receive(bucket: S3Bucket, name: str, file: BinaryIO, span: range, on_bytes: OnBytes) -> tuple[int, int]:
    """Write the bytes of a span; return the start and end of the bytes received. The object may end before the span."""
    position, end = span.start, span.stop

    def request() -> bool:
        """Resume where the last response broke off; return whether any bytes came."""
        nonlocal position
        begin = position
        try:
            response = bucket.sdk.get_object(bucket.bucket, bucket.key(name), offset=begin, length=end - begin)
        except S3Error as error:
            if error.code == "InvalidRange":  # the object ends before this
                return False
            raise
        try:
            for data in response.stream(_READ_BYTES):
                taken = data[: end - position]
                _write_at(file, taken, position)
                position += len(taken)
                metrics.STORE_BYTES.add(len(taken), direction="received")
                on_bytes(len(taken))
        finally:
            response.close() if position < end else response.release_conn()
        return position > begin

    while position < end and bucket.call(f"downloading {name}", request):
        pass
    return span.start, position


def _write_at(file: BinaryIO, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file.fileno(), view, position)
        view, position = view[count:], position + count


def _read_back(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        data = os.pread(file.fileno(), min(_READ_BYTES, end - start), start)
        yield data
        start += len(data)
