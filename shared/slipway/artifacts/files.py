"""Files that go into an artifact, work on several of them, and giving one a second name by the cheapest way there is."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO, TypeVar

from slipway.errors import ArtifactError, StageError

_T = TypeVar("_T")
_R = TypeVar("_R")

WORKERS = 4
"""Files that are worked on at the same time."""
_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file, copy on write
_CHUNK_BYTES = 64 << 20  # of one copy in the kernel, which Ctrl-C cannot interrupt
SMALL_BYTES = 1 << 20
"""What is no larger is copied rather than shared with files that have another owner."""

_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}


def link_or_copy(source: Path, target: Path) -> None:
    """Give ``source``'s content the new name ``target``: a hard link, or a copy where links cannot reach."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        copy_file(source, target)


def clone_or_link(source: Path, target: Path) -> None:
    """As :func:`link_or_copy`, but a copy-on-write clone first, so that a later change of ``source`` stays its own.

    For the same reason a small file, which people edit and whose mode they change, is copied.
    """
    try:
        reflink(source, target)
    except OSError:
        target.unlink(missing_ok=True)
        if source.stat().st_size <= SMALL_BYTES:
            copy_file(source, target)
        else:
            link_or_copy(source, target)


def reflink(source: Path, target: Path) -> None:
    """Clone a file on a file system that shares extents (btrfs, XFS, bcachefs).

    Raises:
        OSError: The file system cannot; ``target`` may then be left empty.
    """
    with source.open("rb") as reader, target.open("xb") as writer:
        fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content in the kernel; a failed copy leaves nothing."""
    try:
        with source.open("rb") as reader, target.open("xb") as writer:
            try:
                while os.copy_file_range(reader.fileno(), writer.fileno(), _CHUNK_BYTES):
                    pass
            except OSError as error:
                if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
                    raise
                reader.seek(0)
                writer.seek(0)
                shutil.copyfileobj(reader, writer, 4 << 20)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file, which takes only some of them when the disk is nearly full."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def folder_files(folder: Path) -> dict[str, Path]:
    """All files below somebody's folder, by their path inside the artifact; links are followed to files.

    Raises:
        ArtifactError: ``FILE_ERROR`` when it is no folder, has no files or has folders that cannot be read; ``ARTIFACT_INVALID`` for
            what would be left out: links to folders or to nothing, and special files.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", reason="FILE_ERROR", about={"folder": folder})
    files = {}
    for path in sorted(_below(folder)):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path
        elif path.is_symlink() or not path.is_dir():
            raise ArtifactError(
                f"{path} is a link to a folder or to nothing, or a special file, which artifacts do not hold",
                reason="ARTIFACT_INVALID",
                remedy="put files in its place, or remove it",
                about={"file": path},
            )
    if not files:
        raise ArtifactError(f"{folder} has no files", reason="FILE_ERROR", about={"folder": folder})
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Everything below a folder; unlike ``rglob`` this does not leave out what is in folders that cannot be read."""

    def refuse(error: OSError) -> None:
        raise ArtifactError(
            f"{error.filename} cannot be read: {error.strerror}", reason="FILE_ERROR", about={"folder": error.filename}
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        yield from (Path(place, name) for name in (*folders, *files))


def regular_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Path inside the artifact and path on disk of every file below a folder, sorted; links and devices are refused."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ArtifactError(
                f"{path} is a link or a special file, which artifacts do not hold",
                reason="ARTIFACT_INVALID",
                about={"file": path},
            )
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def in_threads(
    call: Callable[[_T, Callable[[int], None]], _R], items: Iterable[_T], on_bytes: Callable[[int], None] | None
) -> list[_R]:
    """Call for every item, several at a time; answers in their order. The first error stops the others at their next ``count``.

    That goes for Ctrl-C too: leaving the pool waits for its threads, which could take minutes to read a large model.
    """
    stopped = threading.Event()

    def count(done: int) -> None:
        if stopped.is_set():
            raise StageError("another file failed, or the command was interrupted", reason="CANCELLED")
        if on_bytes is not None:
            on_bytes(done)

    with ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="slipway-files") as pool:
        futures = [pool.submit(call, item, count) for item in items]
        try:
            return gather(futures)
        except BaseException:
            stopped.set()
            cancel(futures)
            raise


def gather(futures: list[Future[_R]]) -> list[_R]:
    """Results of all, or the first failure, as soon as there is one; the others may still run then."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((future for future in futures if future in done and future.exception()), None)
    if failed is not None:
        failed.result()
    return [future.result() for future in futures]


def cancel(futures: Iterable[Future[_R]]) -> None:
    """Begin none of those that wait."""
    for future in futures:
        future.cancel()
