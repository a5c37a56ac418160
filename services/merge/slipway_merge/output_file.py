"""An output file that several threads write at once, and its SHA-256, which is ready when the file is."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

#: copy_file_range is refused between some file systems and by some kernels; the bytes are then read and written.
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
_HASH_BYTES = 1 << 20
_COPY_BYTES = 1 << 20


class OutputFile:
    """A new file of known size. Every byte is written once, in any order; the digest follows what has no gap before it,
    read back while its pages are still in memory.

    Args:
        path: Of the file, which must not exist.
        nbytes: Its size; allocated at once, so that a full disk is found before the work, not after it.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._nbytes = nbytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._written: dict[int, int] = {}  # pieces beyond the first gap: start → end
        self._frontier = 0
        self._abandoned = False
        self._moved = threading.Condition()
        self._hasher = ThreadPoolExecutor(1, "digest")
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._digest: Future[str] = self._hasher.submit(self._hash)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; nobody may write to it any more."""
        with self._moved:
            self._abandoned = True
            self._moved.notify_all()
        self._hasher.shutdown()
        os.close(self._descriptor)

    def digest(self) -> str:
        """Hexadecimal SHA-256 of the file; waits until all of it is written."""
        return self._digest.result()

    def write(self, view: memoryview, position: int) -> None:
        """Write bytes at a position."""
        start = position
        while view:
            count = os.pwrite(self._descriptor, view, position)
            view, position = view[count:], position + count
        self._note(start, position)

    def copy(self, source: int, start: int, position: int, size: int) -> int:
        """Copy bytes of another file in the kernel, sharing the blocks where the file system can.

        Returns:
            Number of bytes copied: fewer than ``size`` when the source is shorter.
        """
        try:
            count = os.copy_file_range(source, self._descriptor, size, start, position)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            data = os.pread(source, min(size, _COPY_BYTES), start)
            self.write(memoryview(data), position)
            return len(data)
        self._note(position, position + count)
        return count

    def _note(self, start: int, end: int) -> None:
        """Move the first gap, and wake the hasher when there is enough for it."""
        if start == end:
            return
        with self._moved:
            self._written[start] = end
            before = self._frontier
            while self._frontier in self._written:
                self._frontier = self._written.pop(self._frontier)
            if self._frontier // _HASH_BYTES != before // _HASH_BYTES or self._frontier == self._nbytes:
                self._moved.notify()

    def _hash(self) -> str:
        sha = hashlib.sha256()
        view = memoryview(bytearray(_HASH_BYTES))
        position = 0
        while position < self._nbytes:
            wanted = min(position + _HASH_BYTES, self._nbytes)
            with self._moved:
                self._moved.wait_for(lambda least=wanted: self._abandoned or self._frontier >= least)  # type: ignore[misc]
                if self._abandoned:
                    return ""
            count = os.preadv(self._descriptor, [view[: wanted - position]], position)
            sha.update(view[:count])
            position += count
        return sha.hexdigest()
