"""Places that hold a source as files by name. A bucket and the hub, which need their libraries, have modules of their own."""

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
        version: Changes with its content.
        digest: Of its content, where the origin tells it; else empty.
    """

    key: str
    size_bytes: int
    version: str
    digest: str = ""


class Origin(Protocol):
    """A place with files. Reading raises :class:`~slipway.errors.ModelExportError`, ``STORE_UNAVAILABLE`` where it is away.

    Attributes:
        url: The address as it was given.
        pinned: The address of this very content, as far as the place can name it.
        where: As ``pinned``, with the service it is at.
        service: The service alone.
    """

    url: str
    pinned: str
    where: str
    service: str

    def during(self, on_wait: OnWait) -> Self:
        """Return the same origin for one transfer, which ``on_wait`` may end."""
        ...

    def listing(self, *, most: int) -> list[OriginFile]:
        """Return all files, sorted; at least one more than ``most`` where there are more."""
        ...

    def read(self, file: OriginFile, offset: int, length: int) -> bytes:
        """Return the bytes of a file, fewer at its end."""
        ...

    def download(self, file: OriginFile, target: Path, *, pool: ThreadPoolExecutor, on_bytes: OnBytes) -> str:
        """Write a file; returns the digest of what came."""
        ...

    def still_has(self, file: OriginFile) -> bool:
        """Return whether the file is still the one that was listed."""
        ...


class ArtifactOrigin:
    """An artifact in the store, looked at without being fetched."""

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
        """Never called: what is an artifact already is not stored again."""
        raise NotImplementedError

    def still_has(self, file: OriginFile) -> bool:  # noqa: ARG002
        """True: its digest is its name."""
        return True
