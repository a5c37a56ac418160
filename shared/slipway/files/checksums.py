"""``MANIFEST.sha256``: the checksum of every file of a folder, as ``sha256sum`` writes and checks it."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from slipway.errors import ArtifactError
from slipway.files.paths import all_files, open_real, real_file

MANIFEST = "MANIFEST.sha256"
LARGEST = 64 << 20
"""Largest list of checksums that is read, in bytes."""
_SHOWN = 200


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
    text = data.decode()
    digests = {}
    for line in text.removesuffix("\n").split("\n"):
        digest, name = line[:64], line[66:]
        if len(digest) != 64 or not name or ".." in Path(name).parts or Path(name).is_absolute():
            raise ArtifactError(f"{file}: {line[:_SHOWN]!r} is not a checksum line", reason="ARTIFACT_INVALID")
        digests[name] = digest
    return digests


def verify_directory(folder: Path) -> tuple[int, list[str]]:
    """Compare every file of a folder with its checksums.

    Returns:
        The number of checked files, and one line per fault.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` if there are no checksums, or for special files; ``LINK_OUTSIDE``.
    """
    expected, present = read_checksums(folder), dict(all_files(folder))
    faults = []
    for name, digest in sorted(expected.items()):
        if name not in present:
            faults.append(f"{name}: missing")
        elif _sha256(present[name]) != digest:
            faults.append(f"{name}: does not have its checksum")
    faults += [f"{name}: not in {MANIFEST}" for name in sorted(set(present) - set(expected) - {MANIFEST})]
    return len(expected), faults


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


def _sha256(path: Path) -> str:
    with open_real(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
