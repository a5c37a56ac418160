"""The content of single files, streamed into and out of a store: for a server that passes it on, with bounded memory.

What comes in is kept under a digest only once it was found to have it.
"""

from __future__ import annotations

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from slipway.artifacts.faults import corrupt, disk_full, not_found
from slipway.artifacts.files import link_or_copy, write_all
from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.artifacts.store import OnBytes
from slipway.errors import ArtifactError
from slipway.files.links import open_unlinked

CHUNK_BYTES = 1 << 20


class BlobWriter(ABC):
    """Content on its way in. Call :meth:`commit` after the last :meth:`write`, or :meth:`discard` to give up.

    Args:
        file: Announced digest and size.
    """

    def __init__(self, file: ManifestFile) -> None:
        self.file = file
        self._sha = hashlib.sha256()
        self._count = 0

    def write(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID`` when they are more than was announced; ``DISK_FULL``, and what the store raises.
        """
        self._count += len(data)
        if self._count > self.file.size_bytes:
            raise self._unlike(f"has more than the announced {self.file.size_bytes} bytes")
        self._sha.update(data)
        self._take(data)

    def commit(self) -> None:
        """Keep the content, if it is what was announced.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID`` when it is not, and what the store raises.
        """
        if self._count != self.file.size_bytes:
            raise self._unlike(f"ended after {self._count} of the announced {self.file.size_bytes} bytes")
        found = f"sha256:{self._sha.hexdigest()}"
        if found != self.file.digest:
            raise self._unlike(f"has the digest {found}")
        self._keep()

    @abstractmethod
    def discard(self) -> None:
        """Leave nothing behind of what was not committed; harmless to repeat and after a commit."""

    @abstractmethod
    def _take(self, data: bytes) -> None: ...

    @abstractmethod
    def _keep(self) -> None: ...

    def _unlike(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"the content that was announced as {self.file.digest} {what}",
            reason="ARTIFACT_INVALID",
            remedy="send it again when nothing writes to the file any more",
            about={"digest": self.file.digest},
        )


class Blobs(Protocol):
    """A store, file by file."""

    def manifest(self, digest: str) -> Manifest:
        """The files of an artifact."""
        ...

    def exists(self, digest: str) -> bool:
        """Whether an artifact is complete."""
        ...

    def has_blob(self, file: ManifestFile) -> bool:
        """Whether a file's content is there, and no collection is about to take it."""
        ...

    def read(self, file: ManifestFile, artifact: str, *, offset: int = 0) -> Iterator[bytes]:
        """A file's content from an offset, in chunks. Read from the beginning, it is compared with its digest.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, or ``ARTIFACT_CORRUPT`` after the last chunk; the corrupt blob is removed.
        """
        ...

    def writer(self, file: ManifestFile) -> BlobWriter:
        """Takes a file's content."""
        ...

    def keep(self, file: ManifestFile, path: Path, *, on_bytes: OnBytes) -> None:
        """Take a finished file whose digest is known; ``on_bytes`` may end that."""
        ...

    def admit(self, manifest: Manifest) -> None:
        """Commit an artifact whose content is there."""
        ...


def verified(
    chunks: Iterator[bytes], file: ManifestFile, artifact: str, *, remove: Callable[[], None]
) -> Iterator[bytes]:
    """All chunks of a file; when they were not its content, it is removed and called corrupt.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT``, after the last chunk.
    """
    sha = hashlib.sha256()
    for data in chunks:
        sha.update(data)
        yield data
    if f"sha256:{sha.hexdigest()}" != file.digest:
        remove()
        raise corrupt(artifact, file.path)


class LocalBlobs:
    """:class:`Blobs` of a local folder."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.manifest, self.exists = store.manifest, store.exists
        self.has_blob = store.has_blob

    def admit(self, manifest: Manifest) -> None:
        """As :meth:`Blobs.admit`. From then on no collection takes its content; one that did so just before is found out."""
        self._store.admit(manifest)
        for file in manifest.files:
            if not self.has_blob(file):
                raise _collected(file)

    def read(self, file: ManifestFile, artifact: str, *, offset: int = 0) -> Iterator[bytes]:
        """As :meth:`Blobs.read`."""
        try:
            source = open_unlinked(self._store.blob_path(file.digest))
        except FileNotFoundError as error:
            raise not_found(artifact) from error
        except ArtifactError as error:  # the store has not put that there
            self._store.drop_blob(file.digest)
            raise corrupt(artifact, file.path) from error
        with source:
            source.seek(offset)
            chunks = iter(lambda: source.read(CHUNK_BYTES), b"")
            if offset == 0:
                chunks = verified(chunks, file, artifact, remove=lambda: self._store.drop_blob(file.digest))
            yield from chunks

    def writer(self, file: ManifestFile) -> BlobWriter:
        """As :meth:`Blobs.writer`."""
        return _LocalWriter(self._store, file)

    def keep(self, file: ManifestFile, path: Path, *, on_bytes: OnBytes) -> None:
        """As :meth:`Blobs.keep`, by a hard link where that reaches."""
        on_bytes(0)
        arriving = self._store.root / "uploads" / uuid.uuid4().hex
        try:
            with disk_full("storing", file.path, at=self._store.root), open_unlinked(path) as source:
                self._take(file, source, arriving)
        finally:
            arriving.unlink(missing_ok=True)

    def _take(self, file: ManifestFile, source: BinaryIO, arriving: Path) -> None:
        try:
            link_or_copy(source, arriving)
            arriving.chmod(0o444)
            self._store.admit_blob(file, arriving)
        except FileNotFoundError as error:
            if error.filename == source.name:
                raise
            raise _collected(file) from error


class _LocalWriter(BlobWriter):
    def __init__(self, store: LocalStore, file: ManifestFile) -> None:
        super().__init__(file)
        self._store = store
        self._path = store.root / "uploads" / uuid.uuid4().hex
        self._target: BinaryIO | None = None

    def _take(self, data: bytes) -> None:
        with disk_full("receiving", self.file.digest, at=self._store.root):
            if self._target is None:
                self._target = self._path.open("xb", buffering=0)
            write_all(self._target, data)

    def _keep(self) -> None:
        self._take(b"")
        try:
            self._path.chmod(0o444)
            self._store.admit_blob(self.file, self._path)
        except FileNotFoundError as error:
            raise _collected(self.file) from error
        self.discard()

    def discard(self) -> None:
        if self._target is not None:
            self._target.close()
        self._path.unlink(missing_ok=True)


def _collected(file: ManifestFile) -> ArtifactError:
    return ArtifactError(
        f"a garbage collection took {file.digest} away while its artifact was made",
        reason="STORE_UNAVAILABLE",
        remedy="send it again",
    )
