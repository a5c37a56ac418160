"""What the hub's library is given to send: a file that counts what is read of it. What it says and raises is sorted here, too."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from collections.abc import Iterator
from typing import BinaryIO

from slipway.publishing.release import OnBytes

_LOGGERS = ("huggingface_hub", "huggingface_hub._commit_api", "huggingface_hub.hf_api")


class CountedFile(io.BufferedIOBase):
    """A file that tells how much was read of it; a part that is read again counts once more.

    The library sends such a file by the protocol of Git LFS, and not by Xet.
    """

    def __init__(self, file: BinaryIO, on_bytes: OnBytes) -> None:
        self._file, self._on_bytes, self.done = file, on_bytes, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        data = self._file.read(-1 if size is None else size)
        self.done += len(data)
        self._on_bytes(len(data))
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place."""
        return self._file.tell()


def blob_id(data: bytes) -> str:
    """Return Git's name of a content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """Keep the library from warning that files are not sent by Xet, which is meant."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    for log in loggers:
        log.addFilter(is_error)
    try:
        yield
    finally:
        for log in loggers:
            log.removeFilter(is_error)
