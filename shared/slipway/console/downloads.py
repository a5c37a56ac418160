"""An artifact as one file to download: a tar of its files, whose size is known before its first byte."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator

from slipway.artifacts import Manifest, ManifestFile

_BLOCK = tarfile.BLOCKSIZE
_RECORD = tarfile.RECORDSIZE


def tar_bytes(manifest: Manifest, folder: str) -> int:
    """Return the size of the tar of an artifact, in bytes."""
    count = sum(len(_header(folder, file)) + _padded(file.size_bytes) for file in manifest.files)
    return -(-(count + 2 * _BLOCK) // _RECORD) * _RECORD


def tar_of(manifest: Manifest, folder: str, content: Callable[[ManifestFile], Iterator[bytes]]) -> Iterator[bytes]:
    """Yield the tar of an artifact: its files in a folder, readable by everybody, and with no time or owner of their own.

    Args:
        manifest: The artifact.
        folder: Name of the folder.
        content: Yields the content of a file.

    Raises:
        ModelExportError: An error of ``content``.
    """
    sent = 0
    for file in manifest.files:
        header = _header(folder, file)
        yield header
        yield from content(file)
        rest = _padded(file.size_bytes) - file.size_bytes
        if rest:
            yield bytes(rest)
        sent += len(header) + _padded(file.size_bytes)
    yield bytes(tar_bytes(manifest, folder) - sent)


def _header(folder: str, file: ManifestFile) -> bytes:
    member = tarfile.TarInfo(f"{folder}/{file.path}")
    member.size, member.mode = file.size_bytes, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def _padded(count: int) -> int:
    return -(-count // _BLOCK) * _BLOCK
