"""Stream the content of single files into and out of a store with bounded memory, for a server that passes it on.

Incoming content is stored under a digest only after its digest was verified.
"""

from __future__ import annotations

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from slipway.artifacts.faults import corrupt_error, disk_full, not_found_error
from slipway.artifacts.files import link_or_copy, write_all
from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.artifacts.store import OnBytes
from slipway.errors import ArtifactError
from slipway.files.paths import open_unlinked

CHUNK_BYTES = 1 << 20


class BlobWriter(ABC):
    """Writes incoming content. Call :meth:`commit` after the last :meth:`write`, or :meth:`discard` to give up.

    Args:
        file: Announced digest and size.
    """

    def __init__(self, file: ManifestFile) -> None:
        self.file = file
        self._sha = hashlib.sha256()
        self._count = 0
        self._whole = True

    @property
    def position(self) -> int | None:
        """Number of bytes written so far; None after a failed write, which may have stored a part of its bytes."""
        return self._count if self._whole else None

    def write(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID`` for more bytes than announced; ``DISK_FULL``; errors of the store.
        """
        self._whole = False
        self._count += len(data)
        if self._count > self.file.size_bytes:
            raise self._mismatch_error(f"has more than the announced {self.file.size_bytes} bytes")
        self._sha.update(data)
        self._take(data)
        self._whole = True

    def commit(self) -> None:
        """Store the content if it has the announced size and digest.

        Raises:
            ArtifactError: ``ARTIFACT_INVALID`` if it has not; errors of the store.
        """
        if self._count != self.file.size_bytes:
            raise self._mismatch_error(f"ended after {self._count} of the announced {self.file.size_bytes} bytes")
        self._whole = False
        digest = f"sha256:{self._sha.hexdigest()}"
        if digest != self.file.digest:
            raise self._mismatch_error(f"has the digest {digest}")
        self._keep()

    @abstractmethod
    def discard(self) -> None:
        """Remove content that was not committed; harmless to repeat, and after a commit."""

    @abstractmethod
    def _take(self, data: bytes) -> None: ...

    @abstractmethod
    def _keep(self) -> None: ...

    def _mismatch_error(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"the content announced as {self.file.digest} {what}",
            reason="ARTIFACT_INVALID",
            remedy="send it again once no program writes to the file any more",
            about={"digest": self.file.digest},
        )


class Blobs(Protocol):
    """Access to a store file by file."""

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of an artifact."""
        ...

    def exists(self, digest: str) -> bool:
        """Return whether an artifact is complete."""
        ...

    def has_blob(self, file: ManifestFile) -> bool:
        """Return whether the store has a file's content and no garbage collection is about to remove it."""
        ...

    def read(self, file: ManifestFile, artifact: str, *, offset: int = 0) -> Iterator[bytes]:
        """Yield a file's content from an offset, in chunks. Content read from the beginning is compared with its digest.

        Raises:
            ArtifactError: ``ARTIFACT_NOT_FOUND``, or ``ARTIFACT_CORRUPT`` after the last chunk; the corrupt blob is removed.
        """
        ...

    def address(self, file: ManifestFile, endpoint: str, seconds: int) -> str:
        """Return an address at which anyone gets a file's content for so long; empty for a store that no other service gives out.

        Args:
            file: The file.
            endpoint: Where the service of the store is reached.
            seconds: How long the address is valid.
        """
        ...

    def writer(self, file: ManifestFile) -> BlobWriter:
        """Return a writer for a file's content."""
        ...

    def keep(self, file: ManifestFile, path: Path, *, on_bytes: OnBytes) -> None:
        """Store a finished file whose digest is known; ``on_bytes`` may raise to stop."""
        ...

    def admit(self, manifest: Manifest) -> None:
        """Commit an artifact whose content is in the store."""
        ...


def verify_chunks(
    chunks: Iterator[bytes], file: ManifestFile, artifact: str, *, remove: Callable[[], None]
) -> Iterator[bytes]:
    """Yield all chunks of a file; remove it if they do not have its digest.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT``, after the last chunk.
    """
    sha = hashlib.sha256()
    for data in chunks:
        sha.update(data)
        yield data
    if f"sha256:{sha.hexdigest()}" != file.digest:
        remove()
        raise corrupt_error(artifact, file.path)


class LocalBlobs:
    """:class:`Blobs` of a local folder."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.manifest, self.exists = store.manifest, store.exists
        self.has_blob = store.has_blob

    def admit(self, manifest: Manifest) -> None:
        """As :meth:`Blobs.admit`. From then on no collection removes the content; detect one that just did."""
        self._store.admit(manifest)
        for file in manifest.files:
            if not self.has_blob(file):
                raise _collected_error(file)

    def read(self, file: ManifestFile, artifact: str, *, offset: int = 0) -> Iterator[bytes]:
        """As :meth:`Blobs.read`."""
        try:
            source = open_unlinked(self._store.blob_path(file.digest))
        except FileNotFoundError as error:
            raise not_found_error(artifact) from error
        except ArtifactError as error:  # something that the store has not written
            self._store.drop_blob(file.digest)
            raise corrupt_error(artifact, file.path) from error
        with source:
            source.seek(offset)
            chunks = iter(lambda: source.read(CHUNK_BYTES), b"")
            if offset == 0:
                chunks = verify_chunks(chunks, file, artifact, remove=lambda: self._store.drop_blob(file.digest))
            yield from chunks

    def address(self, file: ManifestFile, endpoint: str, seconds: int) -> str:  # noqa: ARG002 - the protocol's
        """Return no address: nothing but this process gives out what is in the folder."""
        return ""

    def writer(self, file: ManifestFile) -> BlobWriter:
        """As :meth:`Blobs.writer`."""
        return _LocalWriter(self._store, file)

    def keep(self, file: ManifestFile, path: Path, *, on_bytes: OnBytes) -> None:
        """As :meth:`Blobs.keep`, by a hard link where possible."""
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
            raise _collected_error(file) from error


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
            raise _collected_error(self.file) from error
        self.discard()

    def discard(self) -> None:
        if self._target is not None:
            self._target.close()
        self._path.unlink(missing_ok=True)


def _collected_error(file: ManifestFile) -> ArtifactError:
    return ArtifactError(
        f"a garbage collection removed {file.digest} while its artifact was made",
        reason="STORE_UNAVAILABLE",
        remedy="send it again",
    )
