"""``MANIFEST.sha256``: the checksum of every file of a folder, as ``sha256sum`` writes and checks it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from slipway.errors import ArtifactError
from slipway.files.paths import all_files, open_real, real_file

MANIFEST = "MANIFEST.sha256"
LARGEST = 64 << 20
"""Largest list of checksums that is read, in bytes."""
_SHOWN = 200
_PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write_checksums(folder: Path, *, known: Mapping[str, str]) -> None:
    """Write the checksums of all files below a folder into it.

    Args:
        folder: The folder.
        known: Digests (``sha256:…``) already known, by file path; those files are not read again.
    """
    digests = {
        name: known.get(name, "").removeprefix("sha256:") or _sha256(path) for name, path in sorted(all_files(folder))
    }
    lines = [f"{digest}  {name}\n" for name, digest in digests.items()]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Read hexadecimal SHA-256 by file name.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` if there are none, or one names a file outside the folder; ``LINK_OUTSIDE``.
    """
    try:
        return _read_list(real_file(folder, MANIFEST))
    except (OSError, UnicodeDecodeError, ArtifactError) as error:
        if isinstance(error, ArtifactError) and error.reason != "FILE_ERROR":
            raise
        raise ArtifactError(
            f"{folder} has no readable {MANIFEST}",
            reason="ARTIFACT_INVALID",
            remedy=_checksums_remedy(folder),
            about={"folder": folder},
        ) from error


def _read_list(file: Path) -> dict[str, str]:
    with open_real(file) as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(errno.EFBIG, f"larger than {LARGEST} bytes", str(file))
    return parse_checksums(data, where=str(file))


def parse_checksums(data: bytes, *, where: str) -> dict[str, str]:
    """Read hexadecimal SHA-256 by file name from the content of a list.

    Args:
        data: The content.
        where: Where it comes from, for messages.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` for a line that is none, or that names a file outside the folder.
        UnicodeDecodeError: It is no text.
    """
    digests = {}
    for line in data.decode().removesuffix("\n").split("\n"):
        digest, name = line[:64], line[66:]
        outside = ".." in Path(name).parts or Path(name).is_absolute()
        if _SHA256.fullmatch(digest) is None or not name or outside:
            raise ArtifactError(f"{where}: {line[:_SHOWN]!r} is not a checksum line", reason="ARTIFACT_INVALID")
        digests[name] = digest
    return digests


def verify_directory(folder: Path) -> tuple[int, list[str]]:
    """Compare every file of a folder with its checksums.

    Returns:
        The number of checked files, and one line per fault.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` if there are no checksums, or for special files; ``LINK_OUTSIDE``.
    """
    expected = read_checksums(folder)
    return len(expected), checksum_faults(expected, hash_files(folder))


def hash_files(folder: Path, *, on_bytes: Callable[[int], None] = lambda _: None) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of every file below a folder, by its path in it.

    Args:
        folder: The folder.
        on_bytes: Called with the size of each piece that was read.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` for special files; ``LINK_OUTSIDE``; ``FILE_ERROR``.
    """
    return {name: _sha256(path, on_bytes=on_bytes) for name, path in all_files(folder)}


def checksum_faults(
    expected: Mapping[str, str], digests: Mapping[str, str], *, unlisted: Collection[str] = ()
) -> list[str]:
    """Compare the files of a folder with its checksums; return one line per fault.

    Args:
        expected: The checksums.
        digests: Result of :func:`hash_files`.
        unlisted: Files that need no checksum, because they were added later.
    """
    faults = []
    for name, digest in sorted(expected.items()):
        if name not in digests:
            faults.append(f"{name}: missing")
        elif digests[name] != digest:
            faults.append(f"{name}: does not have its checksum")
    extra = set(digests) - set(expected) - {MANIFEST} - set(unlisted)
    return faults + [f"{name}: not in {MANIFEST}" for name in sorted(extra)]


def changed_files(folder: Path, expected: Mapping[str, str], *, since: int) -> list[str]:
    """Return the files that lack their checksum, or are not there; only those that changed later are read.

    Args:
        folder: The folder.
        expected: Hexadecimal SHA-256 by file name.
        since: Files that changed at or before this time (``st_ctime_ns``) are not read.
    """
    present = dict(all_files(folder))
    return [
        name
        for name, digest in sorted(expected.items())
        if name not in present or (present[name].stat().st_ctime_ns > since and _sha256(present[name]) != digest)
    ]


def without_checksums(files: Mapping[str, Path]) -> dict[str, Path]:
    """Drop ``MANIFEST.sha256`` if it correctly lists all other files: pulling the artifact writes it again.

    A list with a wrong checksum stays, because it shows the damage.

    Args:
        files: Real paths of a folder's files, by their path in it.
    """
    try:
        listed = _read_list(files[MANIFEST]) if MANIFEST in files else {}
    except (OSError, UnicodeDecodeError, ArtifactError):
        listed = {}
    described = len(files) > 1 and set(listed) == set(files) - {MANIFEST}
    described = described and all(_sha256(files[name]) == digest for name, digest in listed.items())
    return {name: path for name, path in files.items() if name != MANIFEST or not described}


def _checksums_remedy(folder: Path) -> str:
    above = Path(os.path.normpath(folder.absolute())).parent
    if (above / MANIFEST).is_file():
        return f"name {above}, whose checksums cover this folder too"
    return "name the folder that slipway export delivered or slipway pull wrote, or an artifact's digest (sha256:…)"


def _sha256(path: Path, *, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    sha, buffer = hashlib.sha256(), bytearray(_PIECE_BYTES)
    with open_real(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            sha.update(memoryview(buffer)[:count])
            on_bytes(count)
    return sha.hexdigest()
