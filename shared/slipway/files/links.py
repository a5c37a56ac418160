"""One rule for links in somebody's folder, wherever it is read, stored, pushed, copied or hashed.

A link may stay inside its folder, or lead from a snapshot of the Hugging Face cache into the ``blobs/`` of the same repository.
Every other link is refused by name: a checkpoint that somebody else made must not bring files of this machine with it.

What is found here is a real path, without any link in it. :func:`open_real` follows none either, so that a link that takes a
file's or a folder's place after the check is not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from slipway.errors import ArtifactError

_CACHED = ("models--", "datasets--")
"""Beginnings of the names of repositories in the cache."""
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe that nobody writes to would be waited for


def file_in(folder: Path, name: str | Path) -> Path | None:
    """Return the real path of a file in a folder; None where there is none, or where no file system takes its name.

    Args:
        folder: The folder; it may be a link itself, as its user named it.
        name: Path of the file, relative to the folder.

    Raises:
        ArtifactError: ``LINK_OUTSIDE`` for a link that leads out of the folder, or a path through one; ``ARTIFACT_INVALID`` for
            what is no regular file.
        OSError: It cannot be looked at.
    """
    path = folder / name
    try:
        real = Path(os.path.realpath(path))
    except ValueError:  # a NUL, or half of a surrogate pair
        return None
    if not any(real.is_relative_to(place) for place in _allowed(folder)):
        raise _leads_out(path, folder)
    try:
        mode = real.lstat().st_mode
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
            return None
        raise
    if stat.S_ISDIR(mode):
        return None
    if not stat.S_ISREG(mode):
        raise not_regular(path)
    return real


def real_file(folder: Path, name: str | Path) -> Path:
    """Return the real path of a file that is in a folder.

    Raises:
        ArtifactError: As :func:`file_in`, and ``FILE_ERROR`` when there is none.
    """
    found = file_in(folder, name)
    if found is None:
        raise ArtifactError(f"{folder / name} is not there", reason="FILE_ERROR", about={"file": folder / name})
    return found


def files_in(folder: Path, names: Iterable[str | Path]) -> list[Path]:
    """Return those of some files that are in a folder, as paths below it.

    Raises:
        ArtifactError: As :func:`file_in`.
    """
    return [folder / name for name in names if file_in(folder, name) is not None]


def all_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the real path of every file below a folder, sorted by its path; nothing is left out silently.

    Raises:
        ArtifactError: As :func:`file_in`; ``ARTIFACT_INVALID`` also for a link to a folder or to nothing; ``FILE_ERROR`` for a folder
            that cannot be read.
    """
    for path in sorted(_below(folder)):
        real = file_in(folder, path.relative_to(folder))
        if real is not None:
            yield path.relative_to(folder).as_posix(), real
        elif path.is_symlink() or not path.is_dir():
            raise not_regular(path)


def open_real(path: Path) -> BinaryIO:
    """Open a regular file by its real path, unbuffered. No link is followed on the way to it.

    Raises:
        ArtifactError: ``LINK_OUTSIDE`` when the path has become a link or leads through one; ``ARTIFACT_INVALID`` for what is no
            regular file.
        OSError: It cannot be opened.
    """

    def opener(name: str, _flags: int) -> int:
        place = os.open("/", _SEARCH)
        *folders, last = Path(name).absolute().parts[1:]
        try:
            for folder in folders:
                below = os.open(folder, _SEARCH, dir_fd=place)
                os.close(place)
                place = below
            return os.open(last, _READ, dir_fd=place)
        finally:
            os.close(place)

    try:
        return _regular(path, open(path, "rb", buffering=0, opener=opener))
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENOTDIR}:
            raise
        raise ArtifactError(
            f"{path} has become a link, or leads through one",
            reason="LINK_OUTSIDE",
            remedy="see who changes the folder, and try again when nobody does",
            about={"file": path},
        ) from error


def open_unlinked(path: Path) -> BinaryIO:
    """Open a regular file that is no link, unbuffered; of the way to it nothing is asked.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` for a link, and for what is no regular file.
        OSError: It cannot be opened.
    """
    try:
        return _regular(path, open(path, "rb", buffering=0, opener=lambda name, _: os.open(name, _READ)))
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:
            raise
        raise not_regular(path) from error


def not_regular(path: Path) -> ArtifactError:
    """Describe what is no file and no folder, or a link to a folder or to nothing."""
    return ArtifactError(
        f"{path} is a link to a folder or to nothing, or a special file, which artifacts do not hold",
        reason="ARTIFACT_INVALID",
        remedy="put files in its place, or remove it",
        about={"file": path},
    )


def _regular(path: Path, file: BinaryIO) -> BinaryIO:
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise not_regular(path)


def _allowed(folder: Path) -> Iterator[Path]:
    """Yield the real folders that links of a folder may lead to."""
    root = Path(os.path.realpath(folder))
    yield root
    for place in (root, *root.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith(_CACHED):
            yield repository / "blobs"


def _leads_out(path: Path, folder: Path) -> ArtifactError:
    return ArtifactError(
        f"{path} is a link, or leads through one, to {os.path.realpath(path)}, outside of {folder}",
        reason="LINK_OUTSIDE",
        remedy="put a copy of the file in its place, or remove it",
        about={"file": path},
    )


def _below(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder; unlike ``rglob`` this does not leave out what is in folders that cannot be read."""

    def refuse(error: OSError) -> None:
        raise ArtifactError(
            f"{error.filename} cannot be read: {error.strerror}", reason="FILE_ERROR", about={"folder": error.filename}
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        yield from (Path(place, name) for name in (*folders, *files))
