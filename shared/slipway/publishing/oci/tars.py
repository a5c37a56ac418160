"""Files of a release as one uncompressed tar, made while it is read: the same files always give the same bytes, and none is written."""

from __future__ import annotations

import hashlib
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath

from slipway.publishing.release import ReleasedFile

ReadAt = Callable[[int, int], bytes]
"""Takes a size and an offset; returns bytes from there, at most that many, and none at the end."""
_BLOCK_BYTES = 512
_END = bytes(2 * _BLOCK_BYTES)
_PIECE_BYTES = 1 << 20


class TarLayer:
    """A tar of some files with the folders above them, which belong to nobody and have no time.

    Args:
        files: Files by their paths in the tar, in the order in which they stand in it.
    """

    def __init__(self, files: Sequence[tuple[str, ReleasedFile]]) -> None:
        self._digest = ""
        self._starts: list[int] = []
        self._parts: list[bytes | ReleasedFile] = []
        self.size_bytes = 0
        folders = {str(folder) for path, _ in files for folder in PurePosixPath(path).parents if folder.name}
        self._add(b"".join(_header(folder, tarfile.DIRTYPE, 0, 0o755) for folder in sorted(folders)))
        for path, file in files:
            self._add(_header(path, tarfile.REGTYPE, file.size_bytes, 0o644))
            self._add(file)
            self._add(bytes(-file.size_bytes % _BLOCK_BYTES))
        self._add(_END)

    @property
    def digest(self) -> str:
        """Return the digest, once :meth:`measure` has made it."""
        assert self._digest
        return self._digest

    def measure(self, on_wait: Callable[[], None]) -> None:
        """Read all files to know the digest; ``on_wait`` is called for each piece, and may raise.

        Raises:
            ArtifactError: As :meth:`~slipway.publishing.release.ReleasedFile.opened`.
        """
        if self._digest:
            return
        digest, offset = hashlib.sha256(), 0
        with self.opened() as read_at:
            while data := read_at(_PIECE_BYTES, offset):
                digest.update(data)
                offset += len(data)
                on_wait()
        self._digest = f"sha256:{digest.hexdigest()}"

    @contextmanager
    def opened(self) -> Iterator[ReadAt]:
        """Open it for reading at any offset; one of its files is open at a time.

        Raises:
            ArtifactError: As :meth:`~slipway.publishing.release.ReleasedFile.opened`.
        """
        with ExitStack() as stack:
            open_part, descriptor = -1, -1

            def read_at(size: int, offset: int) -> bytes:
                nonlocal open_part, descriptor
                if offset >= self.size_bytes:
                    return b""
                at = bisect_right(self._starts, offset) - 1
                part, begin = self._parts[at], offset - self._starts[at]
                if isinstance(part, bytes):
                    return part[begin : begin + size]
                if at != open_part:
                    stack.close()
                    open_part, descriptor = at, stack.enter_context(part.opened()).fileno()
                return os.pread(descriptor, min(size, part.size_bytes - begin), begin)

            yield read_at

    def _add(self, part: bytes | ReleasedFile) -> None:
        size = len(part) if isinstance(part, bytes) else part.size_bytes
        if size:
            self._starts.append(self.size_bytes)
            self._parts.append(part)
            self.size_bytes += size


def _header(path: str, kind: bytes, size: int, mode: int) -> bytes:
    entry = tarfile.TarInfo(path)
    entry.type, entry.size, entry.mode = kind, size, mode
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
