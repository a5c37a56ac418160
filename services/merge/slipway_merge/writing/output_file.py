"""An output file that several threads write at once, with its SHA-256 computed meanwhile."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: copy_file_range is refused between some file systems and by some kernels; the bytes are then read and written.
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
_COPY_BYTES = 1 << 20
#: Small enough for the processor's cache, beside the working memory.
_READ_BYTES = 1 << 18


class Abandoned(Exception):  # noqa: N818 - not an error: the file is no longer wanted
    """The file was abandoned while a thread waited for its turn."""


class OutputFile:
    """A new file of known size.

    Its portions are written in any order and digested in file order. The thread that wrote a portion digests it, because its processor
    still has the bytes in its cache.

    Args:
        path: Path of the file, which must not exist.
        nbytes: Its size; allocated at once, so that a full disk is detected before the work.

    Attributes:
        nbytes: Its size.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._sha = hashlib.sha256()
        self._digested = 0
        self._abandoned = False
        self._moved = threading.Condition()
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Close the file; it must not be used afterwards."""
        os.close(self._descriptor)

    def abandon(self) -> None:
        """Wake the threads that wait for their turn; they raise :class:`Abandoned`."""
        with self._moved:
            self._abandoned = True
            self._moved.notify_all()

    @property
    def complete(self) -> bool:
        """Whether all of it was written and digested."""
        return self._digested == self.nbytes

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of the complete file."""
        assert self.complete
        return self._sha.hexdigest()

    def write(self, view: memoryview, position: int) -> None:
        """Write bytes at a position."""
        while view:
            count = os.pwrite(self._descriptor, view, position)
            view, position = view[count:], position + count

    def copy(self, source: int, start: int, position: int, size: int) -> int:
        """Copy bytes of another file in the kernel, sharing the blocks where the file system can.

        Returns:
            Number of bytes copied: fewer than ``size`` when the source is shorter.
        """
        try:
            return os.copy_file_range(source, self._descriptor, size, start, position)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            data = os.pread(source, min(size, _COPY_BYTES), start)
            self.write(memoryview(data), position)
            return len(data)

    @contextmanager
    def turn(self, start: int, end: int, view: memoryview | None = None) -> Iterator[None]:
        """Wait until everything before ``start`` is digested, then digest up to ``end``; blocks run in file order.

        Args:
            start: First byte of a written portion.
            end: Its end.
            view: Its bytes; if None, they are read back.

        Raises:
            Abandoned: The file was abandoned meanwhile.
        """
        with self._moved:
            self._moved.wait_for(lambda: self._abandoned or self._digested == start)
            if self._abandoned:
                raise Abandoned
        self._digest(start, end, view)
        yield
        with self._moved:
            self._digested = end
            self._moved.notify_all()

    def _digest(self, position: int, end: int, view: memoryview | None) -> None:
        if view is not None:
            self._sha.update(view)
            return
        buffer = memoryview(bytearray(min(_READ_BYTES, end - position)))
        while position < end:
            count = os.preadv(self._descriptor, [buffer[: end - position]], position)
            if count == 0:
                raise OSError(errno.EIO, f"another program truncated the output file at byte {position}")
            self._sha.update(buffer[:count])
            position += count


class NoFile(OutputFile):
    """Accepts the portions of a file without writing or digesting them, so that they are only computed and checked.

    Args:
        _path: Path of the file, which is not created.
        nbytes: The size that the file would have.
    """

    def __init__(self, _path: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._digested = 0
        self._abandoned = False
        self._moved = threading.Condition()

    def close(self) -> None:
        """Close nothing."""

    def digest(self) -> str:
        """Return an empty digest."""
        return ""

    def write(self, view: memoryview, position: int) -> None:
        """Write nothing."""

    def copy(self, source: int, start: int, position: int, size: int) -> int:
        """Copy nothing; the scan of the source checks that it is long enough."""
        del source, start, position
        return size

    def _digest(self, start: int, end: int, view: memoryview | None) -> None:
        """Digest nothing."""
