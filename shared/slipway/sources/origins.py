"""Origins: places that hold the files of a source. Bucket and hub, which need libraries, have their own modules."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from slipway.artifacts.blobs import Blobs
from slipway.artifacts.store import OnBytes

OnWait = Callable[[], None]


@dataclass(frozen=True, slots=True)
class OriginFile:
    """One file of an origin.

    Attributes:
        key: Path below the origin.
        size_bytes: Its size.
        version: Text that changes with its content.
        digest: Digest of its content if the origin gives it; otherwise empty.
    """

    key: str
    size_bytes: int
    version: str
    digest: str = ""


class Origin(Protocol):
    """A place with files. Reading raises :class:`~slipway.errors.ModelExportError`, ``STORE_UNAVAILABLE`` if it is unavailable.

    Attributes:
        url: The address as given.
        pinned: The address of exactly this content, as far as the origin can name it.
        where: ``pinned`` with the service.
        service: The service alone.
    """

    url: str
    pinned: str
    where: str
    service: str

    def during(self, on_wait: OnWait) -> Self:
        """Return the same origin for one transfer, which ``on_wait`` may stop by an exception."""
        ...

    def listing(self, *, most: int) -> list[OriginFile]:
        """Return all files, sorted; if there are more than ``most``, at least one more than that."""
        ...

    def read(self, file: OriginFile, offset: int, length: int) -> bytes:
        """Return the bytes of a file, fewer at its end."""
        ...

    def download(self, file: OriginFile, target: Path, *, pool: ThreadPoolExecutor, on_bytes: OnBytes) -> str:
        """Write a file; return the digest of the received content."""
        ...

    def still_has(self, file: OriginFile) -> bool:
        """Return whether the file is still the one that was listed."""
        ...


class ArtifactOrigin:
    """An artifact in the store, read without fetching it."""

    def __init__(self, blobs: Blobs, digest: str) -> None:
        self._blobs = blobs
        self.url = self.pinned = self.where = digest
        self.service = ""
        self._files = {file.path: file for file in blobs.manifest(digest).files}

    def during(self, on_wait: OnWait) -> Self:  # noqa: ARG002 - only headers are read
        """As :meth:`Origin.during`."""
        return self

    def listing(self, *, most: int) -> list[OriginFile]:  # noqa: ARG002
        """As :meth:`Origin.listing`."""
        return [OriginFile(path, file.size_bytes, file.digest, file.digest) for path, file in self._files.items()]

    def read(self, file: OriginFile, offset: int, length: int) -> bytes:
        """As :meth:`Origin.read`."""
        data = bytearray()
        chunks = self._blobs.read(self._files[file.key], self.url, offset=offset)
        for chunk in chunks:
            data += chunk
            if length and len(data) >= length:
                break
        return bytes(data[:length] if length else data)

    def download(self, file: OriginFile, target: Path, *, pool: ThreadPoolExecutor, on_bytes: OnBytes) -> str:
        """Raise NotImplementedError: an artifact is never stored again."""
        raise NotImplementedError

    def still_has(self, file: OriginFile) -> bool:  # noqa: ARG002
        """Return True: an artifact is named by its digest."""
        return True
