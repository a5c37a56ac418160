"""Files that go into an artifact, work on several of them, and giving one a second name by the cheapest way there is."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO, TypeVar

from slipway.errors import ArtifactError, StageError
from slipway.files.links import all_files

_T = TypeVar("_T")
_R = TypeVar("_R")

WORKERS = 4
"""Files that are worked on at the same time."""
_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file, copy on write
_CHUNK_BYTES = 64 << 20  # of one copy in the kernel, which Ctrl-C cannot interrupt
SMALL_BYTES = 1 << 20
"""What is no larger is copied rather than shared with files that have another owner."""

_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}


def link_or_copy(source: BinaryIO, target: Path) -> None:
    """Give an open file's content the new name ``target``: a hard link, or a copy where links cannot reach."""
    try:
        os.link(source.name, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    else:
        if os.path.samestat(os.fstat(source.fileno()), target.lstat()):
            return
        target.unlink()  # something else has taken the file's name since it was opened
    copy_file(source, target)


def clone_or_link(source: BinaryIO, target: Path) -> None:
    """As :func:`link_or_copy`, but a copy-on-write clone first, so that a later change of ``source`` stays its own.

    For the same reason a small file, which people edit and whose mode they change, is copied.
    """
    try:
        reflink(source, target)
    except OSError:
        target.unlink(missing_ok=True)
        if os.fstat(source.fileno()).st_size <= SMALL_BYTES:
            copy_file(source, target)
        else:
            link_or_copy(source, target)


def reflink(source: BinaryIO, target: Path) -> None:
    """Clone a file on a file system that shares extents (btrfs, XFS, bcachefs).

    Raises:
        OSError: The file system cannot; ``target`` may then be left empty.
    """
    with target.open("xb") as writer:
        fcntl.ioctl(writer.fileno(), _FICLONE, source.fileno())


def copy_file(source: BinaryIO, target: Path) -> None:
    """Copy an open file's content in the kernel; a failed copy leaves nothing."""
    try:
        with target.open("xb") as writer:
            source.seek(0)
            try:
                while os.copy_file_range(source.fileno(), writer.fileno(), _CHUNK_BYTES):
                    pass
            except OSError as error:
                if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
                    raise
                source.seek(0)
                writer.seek(0)
                shutil.copyfileobj(source, writer, 4 << 20)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file, which takes only some of them when the disk is nearly full."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def folder_files(folder: Path) -> dict[str, Path]:
    """Return the real paths of all files below somebody's folder, by their path inside the artifact.

    Raises:
        ArtifactError: ``FILE_ERROR`` when it is no folder or has no files; what :func:`slipway.files.links.all_files` refuses.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", reason="FILE_ERROR", about={"folder": folder})
    files = dict(all_files(folder))
    if not files:
        raise ArtifactError(f"{folder} has no files", reason="FILE_ERROR", about={"folder": folder})
    return files


def regular_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Path inside the artifact and path on disk of every file below a folder, sorted; links and devices are refused."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            yield path.relative_to(folder).as_posix(), path
        elif not stat.S_ISDIR(mode):
            raise ArtifactError(
                f"{path} is a link or a special file, which artifacts do not hold",
                reason="ARTIFACT_INVALID",
                about={"file": path},
            )


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
