"""The artifact store in a bucket of an S3 service, and marks of long work on it.

Names are those of :mod:`slipway.artifacts.digests`. One file is one object. It is hashed before it is sent directly to the name
that its digest gives. Files that the bucket already has are not sent. Nothing is moved afterwards, because an upload is not visible
before its last part.

The grace period of collections protects what work of a few hours uses. Work that goes on longer writes a mark and renews it, until it
ends. Every artifact used since the beginning of marked work may belong to it. A mark that was not renewed for a grace period belongs
to a dead process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

from slipway.artifacts.adopting import require_blobs
from slipway.artifacts.digests import (
    ACTIONS,
    BLOBS,
    MANIFESTS,
    action_name,
    blob_name,
    digest_bytes,
    digest_of,
    is_store_name,
    key_of,
    manifest_name,
)
from slipway.artifacts.faults import (
    ABSENT,
    changed_error,
    corrupt_error,
    disk_full,
    not_found_error,
    open_source,
)
from slipway.artifacts.files import in_threads, link_or_copy, regular_files
from slipway.artifacts.manifest import Manifest, ManifestFile, describe_file
from slipway.artifacts.s3.client import S3Bucket, StoredObject
from slipway.artifacts.s3.transfer import download, upload, workers
from slipway.artifacts.store import NOTHING_KNOWN, ActionResult, Known, OnBytes
from slipway.errors import ArtifactError
from slipway.files.paths import open_real, open_unlinked

GRACE_SECONDS = 24 * 3600.0
"""Garbage collection keeps younger objects. No commit may take longer than half of this."""

log = logging.getLogger("slipway.artifacts")

_MARKS = "uses/"
_MARK_NAME = re.compile(rf"{_MARKS}[0-9a-f]{{32}}")
_MARK_SECONDS, _MOST_MARK_BYTES = re.compile(rb"\d{1,12}"), 12
_MARK_RENEWALS = 4  # in a grace period


class S3Store:
    """An :class:`~slipway.artifacts.store.ArtifactStore` in a bucket, for any number of processes and machines.

    Args:
        bucket: The bucket.
        grace_seconds: Grace period of this store's collections. A blob older than half of it is touched when it is looked up.
    """

    def __init__(self, bucket: S3Bucket, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.bucket = bucket
        self.grace_seconds = grace_seconds

    def during(self, on_bytes: OnBytes | None) -> S3Store:
        """Return the same store for one transfer; ``on_bytes`` may stop it also while it waits for the service."""
        if on_bytes is None:
            return self
        return S3Store(self.bucket.during(lambda: on_bytes(0)), grace_seconds=self.grace_seconds)

    def put(
        self,
        folder: Path,
        *,
        known: Known = NOTHING_KNOWN,
        adopted: Collection[ManifestFile] = (),
        on_bytes: OnBytes | None = None,
    ) -> str:
        """Commit a folder and files whose blobs the bucket has.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID`` for links and special files, ``FILE_ERROR``, ``ARTIFACT_NOT_FOUND`` for an adopted file,
                and as :meth:`S3Bucket.call`.
        """
        require_blobs(adopted, self.during(on_bytes).has_blob)
        return self._put(dict(regular_files(folder)), open_unlinked, known, on_bytes, adopted)

    def put_files(self, files: Mapping[str, Path], *, on_bytes: OnBytes | None = None) -> str:
        """Commit files, given by their real paths.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID``, ``LINK_OUTSIDE`` for a path that has a link in it, ``FILE_ERROR`` when one changes
                meanwhile, and as :meth:`S3Bucket.call`.
        """
        return self._put(files, open_real, NOTHING_KNOWN, on_bytes)

    def _put(
        self,
        files: Mapping[str, Path],
        opened: Callable[[Path], BinaryIO],
        known: Known,
        on_bytes: OnBytes | None,
        adopted: Collection[ManifestFile] = (),
    ) -> str:
        with workers() as pool:

            def send(item: tuple[str, Path], count: OnBytes) -> ManifestFile:
                name, path = item
                with open_source(opened, path) as file:
                    entry = describe_file(name, file, known=known.get(path), on_bytes=count)
                    self.during(count).put_blob(entry, lambda: contextlib.nullcontext(file), pool, count)
                return entry

            entries = in_threads(send, sorted(files.items()), on_bytes)
        return self.during(on_bytes).commit(Manifest.of([*entries, *adopted]))

    def put_blobs(
        self, manifest: Manifest, open_from: Callable[[ManifestFile], BinaryIO], *, on_bytes: OnBytes | None
    ) -> str:
        """Commit an artifact whose files have been hashed; ``open_from`` opens each of them, unbuffered."""
        with workers() as pool:
            in_threads(
                lambda entry, count: self.during(count).put_blob(entry, partial(open_from, entry), pool, count),
                manifest.files,
                on_bytes,
            )
        return self.during(on_bytes).commit(manifest)

    def commit(self, manifest: Manifest) -> str:
        """Write a manifest after its blobs; return the artifact's digest."""
        digest = manifest.digest
        self.bucket.put(manifest_name(digest), manifest.to_bytes())
        return digest

    def fetch(
        self, digest: str, target: Path, *, leave_out: Collection[str] = (), on_bytes: OnBytes | None = None
    ) -> Path:
        """Write an artifact's files below ``target``, each verified.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``; ``ARTIFACT_CORRUPT`` naming the file, whose blob is removed from the bucket, so
                storing it again repairs the store; ``DISK_FULL``; and as :meth:`S3Bucket.call`.
        """
        store = self.during(on_bytes)
        files = store.manifest(digest).without(leave_out)
        store._touch(manifest_name(digest))
        first = {file.digest: file for file in reversed(files)}
        with disk_full("fetching", digest, at=target), workers() as pool:
            target.mkdir(parents=True)
            for file in files:
                (target / file.path).parent.mkdir(parents=True, exist_ok=True)
            in_threads(
                lambda file, count: self.during(count).fetch_blob(
                    file, digest, target / file.path, pool=pool, on_bytes=count
                ),
                first.values(),
                on_bytes,
            )
            for file in files:
                if first[file.digest] != file:
                    with open_unlinked(target / first[file.digest].path) as same:
                        link_or_copy(same, target / file.path)
        return target

    def fetch_blob(
        self, file: ManifestFile, artifact: str, path: Path, *, pool: ThreadPoolExecutor, on_bytes: OnBytes
    ) -> None:
        """Write one verified blob into a new file; fetch it a second time before reporting it as corrupt."""
        name = blob_name(file.digest)
        for _ in range(2):
            try:
                if download(self.bucket, name, file.size_bytes, path, pool=pool, on_bytes=on_bytes) == file.digest:
                    path.chmod(0o444)
                    return
            except ArtifactError as error:
                if error.reason == "ARTIFACT_NOT_FOUND":
                    raise not_found_error(artifact) from error
                raise
            path.unlink()
        self.bucket.delete([name])
        raise corrupt_error(artifact, file.path)

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of an artifact; read it a second time before reporting it as corrupt.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_CORRUPT``, and as :meth:`S3Bucket.call`.
        """
        name = manifest_name(digest)
        for _ in range(2):
            try:
                data = self.bucket.get(name)
            except ArtifactError as error:
                if error.reason == "ARTIFACT_NOT_FOUND":
                    raise not_found_error(digest) from error
                raise
            if digest_bytes(data) == digest:
                return Manifest.from_bytes(data)
        self.bucket.delete([name])
        raise corrupt_error(digest, "its manifest")

    def exists(self, digest: str) -> bool:
        """Return whether the bucket has the manifest and every blob of an artifact, with the right sizes."""
        try:
            manifest = self.manifest(digest)
        except ArtifactError as error:
            if error.reason in ABSENT:
                return False
            raise
        sizes = {file.digest: file.size_bytes for file in manifest.files}
        entries = in_threads(lambda blob, count: self.during(count).bucket.find(blob_name(blob)), sizes, None)
        return all(
            entry is not None and entry.size_bytes == size for entry, size in zip(entries, sizes.values(), strict=True)
        )

    def action(self, key: str) -> ActionResult | None:
        """Return the result recorded under an action key, if every output still exists."""
        result = self.read_result(key)
        if result is None or not all(self.exists(digest) for digest in result.outputs.values()):
            return None
        for digest in result.outputs.values():
            self._touch(manifest_name(digest))
        return result

    def read_result(self, key: str) -> ActionResult | None:
        """Return the result recorded under an action key, whether or not its outputs exist."""
        try:
            return ActionResult.from_bytes(self.bucket.get(action_name(key)))
        except ArtifactError as error:
            if error.reason in ABSENT:
                return None
            raise

    def record_action(self, key: str, result: ActionResult) -> None:
        """Record a result under its action key."""
        self.bucket.put(action_name(key), result.to_bytes())

    def results(self) -> Iterator[ActionResult]:
        """Yield all recorded results, whether or not their outputs still exist."""
        for entry in self.listing(ACTIONS):
            result = self.read_result(key_of(entry.key))
            if result is not None:
                yield result

    def using(self) -> contextlib.AbstractContextManager[None]:
        """Mark that work is running, once it is close to outlasting the grace period."""
        return mark_work(self.bucket, grace_seconds=self.grace_seconds)

    @property
    def where(self) -> str:
        """Return address and endpoint."""
        return self.bucket.where

    def size_bytes(self) -> int:
        """Return the total size of all blobs."""
        return sum(entry.size_bytes for entry in self.listing(BLOBS))

    def digests(self) -> list[str]:
        """Return the digests of all artifacts, sorted."""
        return [digest_of(entry.key) for entry in self.listing(MANIFESTS)]

    def listing(self, folder: str) -> list[StoredObject]:
        """Return the store's objects below one of its prefixes."""
        return [entry for entry in self.bucket.listing(folder) if is_store_name(entry.key)]

    def last_used(self, digest: str) -> float:
        """Return when an artifact was last made, fetched or reused, in seconds since the epoch.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, and as :meth:`S3Bucket.call`.
        """
        entry = self.bucket.find(manifest_name(digest))
        if entry is None:
            raise not_found_error(digest)
        return entry.modified

    def has_blob(self, file: ManifestFile) -> bool:
        """Return whether the bucket has a file's blob, with the right size, and no collection is about to remove it."""
        entry = self.bucket.find(blob_name(file.digest))
        return entry is not None and entry.size_bytes == file.size_bytes and self._keep_fresh(entry)

    def put_blob(
        self,
        entry: ManifestFile,
        opened: Callable[[], contextlib.AbstractContextManager[BinaryIO]],
        pool: ThreadPoolExecutor,
        on_bytes: OnBytes,
    ) -> None:
        """Store one file unless the bucket has it.

        Raises:
            ArtifactError: ``FILE_ERROR`` when it changes meanwhile, and as :meth:`S3Bucket.call`.
        """
        if self.has_blob(entry):
            return
        name = blob_name(entry.digest)
        with opened() as file:
            before = os.fstat(file.fileno())
            if before.st_size != entry.size_bytes:
                raise changed_error(file.name)
            upload(self.bucket, name, file, entry.size_bytes, pool=pool, on_bytes=on_bytes)
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            self.bucket.delete([name])
            raise changed_error(file.name)

    def _touch(self, name: str) -> None:
        """Touch an object if its last touch is some time ago; read-only credentials are not an error."""
        entry = self.bucket.find(name)
        if entry is not None:
            self._keep_fresh(entry)

    def _keep_fresh(self, entry: StoredObject) -> bool:
        """Return whether an object is safe from collections for the next half of the grace period; touch it if necessary.

        Its present age is not enough: a running collection may already have noticed that no manifest names it.
        """
        if time.time() - entry.modified < self.grace_seconds / 2:
            return True
        try:
            self.bucket.touch(entry.key)
        except ArtifactError as error:
            if error.retryable:
                raise
            return False
        return True


@contextlib.contextmanager
def mark_work(bucket: S3Bucket, *, grace_seconds: float) -> Iterator[None]:
    """Mark the bucket while the block runs, from a quarter of the grace period on."""
    ended = threading.Event()
    keeper = threading.Thread(target=_keep_mark, args=(bucket, grace_seconds / _MARK_RENEWALS, ended), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join(timeout=1)  # a mark that cannot be removed now becomes old by itself


def _keep_mark(bucket: S3Bucket, pause: float, ended: threading.Event) -> None:
    began, name, written = time.monotonic(), f"{_MARKS}{uuid.uuid4().hex}", False
    while not ended.wait(pause):
        try:
            # The service's clock gives the time of the mark, which says how long the work has gone on.
            bucket.put(name, b"%d" % (time.monotonic() - began + 1))
            written = True
        except ArtifactError as error:
            log.warning(
                f"{bucket.where} may remove what a long task needs, because its mark was refused: {error.message}"
            )
    if written:
        with contextlib.suppress(ArtifactError):
            bucket.delete([name])


def oldest_work(bucket: S3Bucket, *, grace_seconds: float, now: float) -> float | None:
    """Return when the oldest marked work began, in seconds since the epoch, or None; 0 if a mark cannot be understood.

    Raises:
        ArtifactError: As :meth:`S3Bucket.call`.
    """
    began = []
    for entry in bucket.listing(_MARKS):
        if _MARK_NAME.fullmatch(entry.key) is None or now - entry.modified > grace_seconds:
            continue
        try:
            content = bucket.get(entry.key) if entry.size_bytes <= _MOST_MARK_BYTES else b""
        except ArtifactError as error:
            if error.reason != "ARTIFACT_NOT_FOUND":  # its work has ended just now
                raise
        else:
            began.append(entry.modified - int(content) if _MARK_SECONDS.fullmatch(content) else 0.0)
    return min(began, default=None)
