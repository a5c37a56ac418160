"""Files of an artifact: list, link and copy them, several in threads, and pull all into a user's folder.

A file is linked or copied by the cheapest means. A pulled artifact is written completely, with its checksums, or not at all.
"""

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

from slipway.artifacts.store import Artifacts, OnBytes
from slipway.errors import ArtifactError, StageError
from slipway.files.checksums import MANIFEST, write_checksums
from slipway.files.paths import all_files, open_unlinked
from slipway.files.work_folders import unfinished

_T = TypeVar("_T")
_R = TypeVar("_R")

WORKERS = 4
"""Files processed at the same time."""
_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file, copy on write
_CHUNK_BYTES = 64 << 20  # size of one copy in the kernel, which Ctrl-C cannot interrupt
SMALL_BYTES = 1 << 20
"""Files up to this size are copied, not hard-linked, if they belong to someone else."""

_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}


def link_or_copy(source: BinaryIO, target: Path) -> None:
    """Create ``target`` as a hard link to an open file, or as a copy where a link is not possible."""
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


def add_name(path: Path, target: Path) -> None:
    """Give a fetched file a second name, or copy it where a link is not possible.

    A large file that is only this folder's becomes read-only, because a change would reach both names.
    """
    with open_unlinked(path) as source:
        status = os.fstat(source.fileno())
        link_or_copy(source, target)
    if status.st_nlink == 1 and status.st_size > SMALL_BYTES and target.samefile(path):
        target.chmod(0o444)


def clone_or_link(source: BinaryIO, target: Path) -> None:
    """As :func:`link_or_copy`, but try a copy-on-write clone first, so that a later change of ``source`` does not reach ``target``.

    For the same reason copy a small file: people edit such files and change their mode.
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
        OSError: The file system cannot clone; ``target`` may be left empty.
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
    """Write all bytes to an unbuffered file, whose ``write`` may take only some of them when the disk is nearly full."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def folder_files(folder: Path) -> dict[str, Path]:
    """Return the real paths of all files below a user's folder, by their path inside the artifact.

    Raises:
        ArtifactError: ``FILE_ERROR`` if it is not a folder or has no files; errors of :func:`slipway.files.paths.all_files`.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", reason="FILE_ERROR", about={"folder": folder})
    files = dict(all_files(folder))
    if not files:
        raise ArtifactError(f"{folder} has no files", reason="FILE_ERROR", about={"folder": folder})
    return files


def regular_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path inside the artifact and path on disk of every file below a folder, sorted; links and devices are refused."""
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
    """Call for every item, several at a time; return the results in order. The first error stops the others at their next ``count``.

    Ctrl-C stops them in the same way, because leaving the pool waits for its threads, which may take minutes over a large model.
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
    """Return all results, or raise the first failure as soon as there is one; the other futures may still run then."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((future for future in futures if future in done and future.exception()), None)
    if failed is not None:
        failed.result()
    return [future.result() for future in futures]


def cancel(futures: Iterable[Future[_R]]) -> None:
    """Cancel the futures that have not begun."""
    for future in futures:
        future.cancel()


def pull(store: Artifacts, digest: str, folder: Path, *, on_bytes: OnBytes | None = None) -> Path:
    """Write an artifact's verified files into a new folder, all or none; return the folder.

    ``MANIFEST.sha256`` beside them lets ``slipway verify`` and ``sha256sum --check`` find what changes later.

    Raises:
        ArtifactError: ``OUTPUT_EXISTS``, and errors of the store's ``fetch``.
    """
    if os.path.lexists(folder):
        raise _exists_error(folder)
    manifest = store.manifest(digest)  # fails before any folder is made
    with unfinished(folder) as scratch:
        files = store.fetch(digest, scratch / "files", on_bytes=on_bytes)
        if not (files / MANIFEST).exists():  # an artifact may have its own checksums
            write_checksums(files, known={file.path: file.digest for file in manifest.files})
        try:
            files.rename(folder)
        except OSError as error:
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                raise
            raise _exists_error(folder) from error  # created meanwhile
    return folder


def _exists_error(folder: Path) -> ArtifactError:
    return ArtifactError(f"{folder} exists already", reason="OUTPUT_EXISTS", remedy="name a new folder")
