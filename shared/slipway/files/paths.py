"""Paths of users: tell folders from addresses, expand ``~``, and follow one rule for links in folders.

Addresses of buckets and servers are possible file names too.

Links are treated alike wherever users' folders are read, stored, pushed, copied or hashed. A link may lead to a place inside its
folder, or from a snapshot of the Hugging Face cache into the ``blobs/`` of the same repository. Every other link is refused by name,
because a checkpoint made by someone else must not pull in files of this machine.

:func:`file_in` and the functions built on it return real paths without links. :func:`open_real` follows no links either, so a link
that replaces a file or folder after the check is not followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from slipway.errors import ArtifactError, ConfigurationError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path keeps only one of the two slashes

_CACHED = ("models--", "datasets--")
"""Prefixes of repository folders in the cache."""
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe waits for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_address(text: str | Path) -> bool:
    """Return whether a text is an address such as ``s3://bucket/prefix`` or ``file:///folder``."""
    return _ADDRESS.match(str(text)) is not None


def check_local(folder: str | Path, *, named_by: str) -> None:
    """Refuse an address where a local folder is needed.

    Args:
        folder: The given value.
        named_by: Setting, variable or argument that gave it.

    Raises:
        ConfigurationError: It is an address.
    """
    if is_address(folder):
        raise ConfigurationError(
            f"{named_by} is {str(folder)!r}, which is not a folder of this machine",
            remedy="name a local folder",
            about={"key": named_by},
        )


def user_path(path: str | Path) -> Path:
    """Return a path with ``~`` replaced; unchanged, as in a shell, if there is no such account."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # no such account; a NUL or half of a surrogate pair in its name
        return Path(path)


def has_unknown_home(path: str | Path) -> bool:
    """Return whether a path begins with the home of an unknown account."""
    return str(user_path(path)).startswith("~")


def file_in(folder: Path, name: str | Path) -> Path | None:
    """Return the real path of a file in a folder; None if it does not exist or its name is impossible.

    Args:
        folder: The folder; it may itself be a link, because the user named it.
        name: Path of the file, relative to the folder.

    Raises:
        ArtifactError: ``LINK_OUTSIDE`` for a link that leads out of the folder, or a path through one; ``ARTIFACT_INVALID`` for
            a special file.
        OSError: The file cannot be examined.
    """
    path = folder / name
    try:
        real = Path(os.path.realpath(path))
    except ValueError:  # a NUL, or half of a surrogate pair
        return None
    if not any(real.is_relative_to(place) for place in _allowed_folders(folder)):
        raise _leads_out_error(path, folder)
    try:
        mode = real.lstat().st_mode
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
            return None
        raise
    if stat.S_ISDIR(mode):
        return None
    if not stat.S_ISREG(mode):
        raise not_regular_error(path)
    return real


def real_file(folder: Path, name: str | Path) -> Path:
    """Return the real path of an existing file in a folder.

    Raises:
        ArtifactError: As :func:`file_in`, and ``FILE_ERROR`` if it does not exist.
    """
    path = file_in(folder, name)
    if path is None:
        raise ArtifactError(f"{folder / name} does not exist", reason="FILE_ERROR", about={"file": folder / name})
    return path


def files_in(folder: Path, names: Iterable[str | Path]) -> list[Path]:
    """Return the named files that exist in a folder, as paths below it.

    Raises:
        ArtifactError: As :func:`file_in`.
    """
    return [folder / name for name in names if file_in(folder, name) is not None]


def all_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the real path of every file below a folder, sorted by path; fail rather than leave one out.

    Raises:
        ArtifactError: As :func:`file_in`; ``ARTIFACT_INVALID`` also for a link to a folder or to nothing; ``FILE_ERROR`` for a folder
            that cannot be read.
    """
    for path in sorted(_walk_below(folder)):
        real = file_in(folder, path.relative_to(folder))
        if real is not None:
            yield path.relative_to(folder).as_posix(), real
        elif path.is_symlink() or not path.is_dir():
            raise not_regular_error(path)


def open_real(path: Path) -> BinaryIO:
    """Open a regular file by its real path, unbuffered, following no link in the path.

    Raises:
        ArtifactError: ``LINK_OUTSIDE`` if the path has become a link or leads through one; ``ARTIFACT_INVALID`` for a special file.
        OSError: The file cannot be opened.
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
        return _require_regular(path, open(path, "rb", buffering=0, opener=opener))
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENOTDIR}:
            raise
        raise ArtifactError(
            f"{path} has become a link, or leads through one",
            reason="LINK_OUTSIDE",
            remedy="check which program changes the folder, and try again when none does",
            about={"file": path},
        ) from error


def open_unlinked(path: Path) -> BinaryIO:
    """Open a regular file that is not itself a link, unbuffered; folders in its path may be links.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` for a link or a special file.
        OSError: The file cannot be opened.
    """
    try:
        return _require_regular(path, open(path, "rb", buffering=0, opener=lambda name, _: os.open(name, _READ)))
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:
            raise
        raise not_regular_error(path) from error


def not_regular_error(path: Path) -> ArtifactError:
    """Return the error for a special file, or a link to a folder or to nothing."""
    return ArtifactError(
        f"{path} is a link to a folder or to nothing, or a special file, which artifacts do not hold",
        reason="ARTIFACT_INVALID",
        remedy="put files in its place, or remove it",
        about={"file": path},
    )


def _require_regular(path: Path, file: BinaryIO) -> BinaryIO:
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise not_regular_error(path)


def _allowed_folders(folder: Path) -> Iterator[Path]:
    """Yield the real folders that links in a folder may lead to."""
    root = Path(os.path.realpath(folder))
    yield root
    for place in (root, *root.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith(_CACHED):
            yield repository / "blobs"


def _leads_out_error(path: Path, folder: Path) -> ArtifactError:
    return ArtifactError(
        f"{path} is a link, or leads through one, to {os.path.realpath(path)}, outside of {folder}",
        reason="LINK_OUTSIDE",
        remedy="put a copy of the file in its place, or remove it",
        about={"file": path},
    )


def _walk_below(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder; unlike ``rglob``, fail for folders that cannot be read."""

    def refuse(error: OSError) -> None:
        raise ArtifactError(
            f"{error.filename} cannot be read: {error.strerror}", reason="FILE_ERROR", about={"folder": error.filename}
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        yield from (Path(place, name) for name in (*folders, *files))
