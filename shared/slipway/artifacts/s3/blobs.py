"""Stream the content of single files into and out of a bucket.

A large file is uploaded in parts under its final name. An upload is not visible before it is completed, and it is completed only
after its digest was verify_chunks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from minio.datatypes import Part
from minio.error import S3Error
from urllib3 import BaseHTTPResponse

from slipway.artifacts.blobs import CHUNK_BYTES, BlobWriter, verify_chunks
from slipway.artifacts.digests import blob_name
from slipway.artifacts.faults import not_found_error
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.artifacts.s3.client import S3_EXCEPTIONS, S3Bucket, is_passing, store_error
from slipway.artifacts.s3.store import S3Store
from slipway.artifacts.s3.transfer import complete, workers
from slipway.artifacts.store import OnBytes
from slipway.backoff import Backoff
from slipway.errors import ArtifactError
from slipway.files.paths import open_unlinked
from slipway.observability import metrics

PART_BYTES = 8 << 20
"""Each incoming file has two parts in memory: one that fills, and one that is sent."""
_MOST_PARTS = 10_000  # limit of the S3 protocol


class S3Blobs:
    """:class:`~slipway.artifacts.blobs.Blobs` of a bucket."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self.manifest, self.exists, self.has_blob = store.manifest, store.exists, store.has_blob

    def admit(self, manifest: Manifest) -> None:
        """Commit an artifact whose content is in the bucket."""
        self._store.commit(manifest)

    def read(self, file: ManifestFile, artifact: str, *, offset: int = 0) -> Iterator[bytes]:
        """As :meth:`~slipway.artifacts.blobs.Blobs.read`; resume when a response breaks off."""
        bucket, name = self._store.bucket, blob_name(file.digest)
        chunks = _chunks(bucket, name, range(offset, file.size_bytes))
        if offset == 0:
            chunks = verify_chunks(chunks, file, artifact, remove=lambda: bucket.delete([name]))
        try:
            yield from chunks
        except ArtifactError as error:
            if error.reason == "ARTIFACT_NOT_FOUND":
                raise not_found_error(artifact) from error
            raise

    def address(self, file: ManifestFile, endpoint: str, seconds: int) -> str:
        """As :meth:`~slipway.artifacts.blobs.Blobs.address`, signed with the store's credentials for this object alone."""
        return self._store.bucket.signed_address(blob_name(file.digest), endpoint, seconds)

    def writer(self, file: ManifestFile) -> BlobWriter:
        """As :meth:`~slipway.artifacts.blobs.Blobs.writer`."""
        return _S3Writer(self._store.bucket, file)

    def keep(self, file: ManifestFile, path: Path, *, on_bytes: OnBytes) -> None:
        """As :meth:`~slipway.artifacts.blobs.Blobs.keep`, sending several parts at the same time."""
        store = self._store.during(on_bytes)
        with workers() as pool:
            store.put_blob(file, lambda: open_unlinked(path), pool, lambda _: on_bytes(0))


def _chunks(bucket: S3Bucket, name: str, span: range) -> Iterator[bytes]:
    """Yield a span of an object; less if the object is shorter."""
    position, doing = span.start, f"reading {name}"
    backoff: Backoff | None = None
    while position < span.stop:
        begin = position
        response = bucket.call(doing, functools.partial(_open, bucket, name, begin, span.stop - begin))
        if response is None:
            return
        try:
            for data in response.stream(CHUNK_BYTES):
                position += len(data)
                metrics.STORE_BYTES.add(len(data), direction="received")
                yield data
        except S3_EXCEPTIONS as error:
            if backoff is None or position > begin:
                backoff = bucket.backoff()
            if not is_passing(error) or backoff.is_over():
                raise store_error(error, doing, bucket.where) from error
            response.close()
            backoff.wait()
        else:
            if position == begin:
                return
        finally:
            response.close() if position < span.stop else response.release_conn()


def _open(bucket: S3Bucket, name: str, offset: int, length: int) -> BaseHTTPResponse | None:
    """Request a span; return the response, or None if the object ends before it."""
    try:
        return bucket.sdk.get_object(bucket.bucket, bucket.key(name), offset=offset, length=length)
    except S3Error as error:
        if error.code == "InvalidRange":
            return None
        raise


class _S3Writer(BlobWriter):
    def __init__(self, bucket: S3Bucket, file: ManifestFile) -> None:
        super().__init__(file)
        self._bucket, self._name = bucket, blob_name(file.digest)
        self._part_bytes = max(PART_BYTES, math.ceil(file.size_bytes / _MOST_PARTS))
        self._part = bytearray()
        self._parts: list[Part] = []
        self._upload_id = ""
        self._sending: Future[Part] | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="slipway-blob")

    def _take(self, data: bytes) -> None:
        self._part += data
        if len(self._part) >= self._part_bytes:
            self._send()

    def _keep(self) -> None:
        if not self._upload_id:
            self._bucket.put(self._name, bytes(self._part))
        else:
            self._send()
            self._collect_sent_part()
            self._bucket.call(
                self._doing,
                lambda: complete(self._bucket, self._name, self._upload_id, self._parts, self.file.size_bytes),
            )
            self._upload_id = ""
        self.discard()

    def discard(self) -> None:
        self._sender.shutdown(cancel_futures=True)
        if self._upload_id:
            upload_id, self._upload_id = self._upload_id, ""
            with contextlib.suppress(*S3_EXCEPTIONS):  # the bucket's lifecycle rule expires an abandoned upload
                self._bucket.sdk._abort_multipart_upload(self._bucket.bucket, self._key, upload_id)

    def _send(self) -> None:
        """Send the full part while the next one fills."""
        self._collect_sent_part()
        data, self._part = bytes(self._part), bytearray()
        if not data:
            return
        if not self._upload_id:
            self._upload_id = self._bucket.call(
                self._doing, lambda: self._bucket.sdk._create_multipart_upload(self._bucket.bucket, self._key, {})
            )
        number = len(self._parts) + 1

        def send() -> Part:
            etag = self._bucket.call(
                self._doing,
                lambda: self._bucket.sdk._upload_part(
                    self._bucket.bucket, self._key, data, None, self._upload_id, number
                ),
            )
            metrics.STORE_BYTES.add(len(data), direction="sent")
            return Part(number, etag)

        self._sending = self._sender.submit(send)

    def _collect_sent_part(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            self._parts.append(sending.result())

    @property
    def _key(self) -> str:
        return self._bucket.key(self._name)

    @property
    def _doing(self) -> str:
        return f"storing {self._name}"
