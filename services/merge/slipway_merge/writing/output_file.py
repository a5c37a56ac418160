"""An output file that several threads write while its SHA-256 is computed, and shards kept for the next attempt.

After an interrupted merge, a shard is kept as a hard link beside a small record of its plan, its SHA-256, and the statistics of its
changes. It is reused only if the plan is the same and its content, read again, has that digest; otherwise it is written again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular
from slipway_merge.tensors.deltas import Change
from slipway_merge.tensors.outputs import Factor, OutputTensor, Shard

#: copy_file_range is refused between some file systems and by some kernels; the bytes are then read and written.
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
_COPY_BYTES = 1 << 20
#: Small enough for the processor's cache, beside the working memory.
_READ_BYTES = 1 << 18

_HASH_BYTES = 1 << 20


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


@dataclass
class Written:
    """Statistics of the written files.

    Attributes:
        changes: Statistics of each updated weight.
        copied: Number of tensors whose bytes were copied.
        converted: Number of tensors that only changed their data type.
    """

    changes: list[Change] = field(default_factory=list)
    copied: int = 0
    converted: int = 0

    def add(self, other: Written) -> None:
        """Add the statistics of another part of the output."""
        self.changes += other.changes
        self.copied += other.copied
        self.converted += other.converted


@dataclass(frozen=True)
class KeptShard:
    """The record beside a kept shard."""

    identity: str
    sha256: str
    written: Written


class KeptShards:
    """The folder of kept shards; without one, nothing is kept.

    Args:
        folder: A folder on the output's file system, for this merge alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def keep(self, shard: Shard, path: Path, *, sha256: str, written: Written) -> None:
        """Keep a finished shard as a second hard link; it is read-only from then on."""
        if self._folder is None:
            return
        kept, record = self._paths(self._folder, shard)
        document = asdict(KeptShard(shard_identity(shard), sha256, written))
        with contextlib.suppress(OSError):  # no hard links or no space here: the merge continues without keeping it
            kept.unlink(missing_ok=True)
            path.chmod(0o444)
            kept.hardlink_to(path)
            record.write_text(json.dumps(document), encoding="utf-8")

    def take(self, shard: Shard, path: Path, *, on_bytes: Callable[[int], None]) -> KeptShard | None:
        """Link a kept shard to ``path``; return None if there is no valid one.

        Args:
            shard: The wanted shard.
            path: Its place in the output, which does not exist yet.
            on_bytes: Called with the number of bytes read so far, to show progress or to raise.
        """
        if self._folder is None:
            return None
        kept, record = self._paths(self._folder, shard)
        try:
            entry = TypeAdapter(KeptShard).validate_json(read_regular(record, largest=LARGEST_LIST), strict=True)
            if entry.identity != shard_identity(shard) or kept.stat().st_size != shard.nbytes:
                return None
            path.hardlink_to(kept)  # before the check, so that the checked bytes are the output's
        except (OSError, ValidationError):
            return None
        if _digest(path, on_bytes) == entry.sha256:
            return entry
        path.unlink()
        return None

    @staticmethod
    def _paths(folder: Path, shard: Shard) -> tuple[Path, Path]:
        return folder / shard.filename, folder / f"{shard.filename}.json"


def _digest(path: Path, on_bytes: Callable[[int], None]) -> str:
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(_HASH_BYTES))
    position = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
            position += count
            on_bytes(position)
    return sha.hexdigest()


def shard_identity(shard: Shard) -> str:
    """Return the digest of the plan of a shard's bytes.

    It need not cover the inputs' content: a kept folder belongs to one action, whose key has the digests of its inputs.
    """
    sha = hashlib.sha256(shard.header)
    for tensor in shard.tensors:
        sha.update(json.dumps(_origin(tensor)).encode() + b"\n")
    return sha.hexdigest()


def _origin(tensor: OutputTensor) -> list[object]:
    source, update, computed = tensor.value.source, tensor.value.update, tensor.value.computed
    origin: list[object] = [tensor.name, source.file.name, source.name, source.dtype, source.shape, source.start]
    if update is not None:
        origin += [update.module, _factor(update.left), _factor(update.right), update.scaling]
    if computed is not None:
        origin += [computed.module, computed.form]
    return origin


def _factor(factor: Factor) -> list[object]:
    info = factor.info
    return [info.file.name, info.name, info.dtype, info.shape, info.start, factor.transposed]
