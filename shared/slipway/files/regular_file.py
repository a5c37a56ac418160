"""Open files of others only if they are regular files, read them only up to a limit, and count the bytes of distinct ones.

Opening a pipe waits for a writer, and reading a device may never end. A link may lead to either.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never block on a pipe or device.

    It is buffered, so ``read`` returns all requested bytes even where one system call returns fewer, as on FUSE.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    check_regular(path)  # before opening, because opening some devices has effects
    return open(_check_descriptor(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)), "rb")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file for reading and writing, or create it; never block on a pipe or device, nor follow a link.

    Raises:
        OSError: The file cannot be opened or created, or is not a regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        check_regular(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    return open(_check_descriptor(path, os.open(path, flags, 0o644)), "r+b", buffering=0)


def check_regular(path: Path) -> None:
    """Refuse anything but a regular file: a program may wait when it opens something else.

    Raises:
        OSError: It is not a regular file, or does not exist (``FileNotFoundError``).
    """
    _require_regular(path, path.stat().st_mode)


def read_regular(path: Path, *, largest: int) -> bytes:
    """Read a whole regular file.

    Args:
        path: The file.
        largest: Most bytes it may have; no more are read.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger.
    """
    data = bytearray()
    with open_regular(path) as file:
        too_large = os.fstat(file.fileno()).st_size > largest
        while not too_large and (part := file.read(min(1 << 20, largest + 1 - len(data)))):
            data += part
            too_large = len(data) > largest
    if too_large:
        raise OSError(errno.EFBIG, f"larger than {largest} bytes", str(path))
    return bytes(data)


def _check_descriptor(path: Path, descriptor: int) -> int:
    """Return the descriptor of a regular file; close any other."""
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))


def distinct_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of files; a file with several names among them is counted once."""
    states = (path.stat() for path in paths)
    return sum({(state.st_dev, state.st_ino): state.st_size for state in states}.values())
