"""``MANIFEST.sha256``: the checksum of every file of a folder, as ``sha256sum`` writes and checks it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from slipway.errors import ArtifactError
from slipway.regular_file import read_regular

MANIFEST = "MANIFEST.sha256"
LARGEST = 64 << 20
"""Bytes of a list of checksums that is read."""


def write_checksums(folder: Path, *, known: Mapping[str, str]) -> None:
    """Write the checksums of all files below a folder into it.

    Args:
        folder: The folder.
        known: Digests (``sha256:…``) of files that need not be read again, by their path.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    digests = {name: known.get(name, "").removeprefix("sha256:") or _sha256(folder / name) for name in names}
    lines = [f"{digest}  {name}\n" for name, digest in digests.items()]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Read hexadecimal SHA-256 by file name.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` when there are none, or one is not of a file below the folder.
    """
    try:
        lines = read_regular(folder / MANIFEST, largest=LARGEST).decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{folder} has no readable {MANIFEST}",
            reason="ARTIFACT_INVALID",
            remedy=_where_they_are(folder),
            about={"folder": folder},
        ) from error
    found = {}
    for line in lines:
        digest, name = line[:64], line[66:]
        if len(digest) != 64 or not name or ".." in Path(name).parts or Path(name).is_absolute():
            raise ArtifactError(f"{folder / MANIFEST}: {line!r} is not a checksum line", reason="ARTIFACT_INVALID")
        found[name] = digest
    return found


def verify_directory(folder: Path) -> tuple[int, list[str]]:
    """Compare every file of a folder with its checksums.

    Returns:
        The number of files checked, and what is wrong with them, one line each.

    Raises:
        ArtifactError: ``ARTIFACT_INVALID`` when there are no checksums.
    """
    expected = read_checksums(folder)
    faults = []
    for name, digest in sorted(expected.items()):
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif _sha256(path) != digest:
            faults.append(f"{name}: does not have its checksum")
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    faults += [f"{name}: not in {MANIFEST}" for name in sorted(present - set(expected) - {MANIFEST})]
    return len(expected), faults


def without_checksums(files: Mapping[str, Path]) -> dict[str, Path]:
    """Leave out right checksums of exactly the other files: an artifact has its own, and whoever pulls it gets them anew.

    Checksums that a file does not have travel, because they show the damage.

    Args:
        files: Files of a folder, by their path in it.
    """
    try:
        listed = read_checksums(files[MANIFEST].parent) if MANIFEST in files else {}
    except ArtifactError:
        listed = {}
    described = len(files) > 1 and set(listed) == set(files) - {MANIFEST}
    described = described and all(_sha256(files[name]) == digest for name, digest in listed.items())
    return {name: path for name, path in files.items() if name != MANIFEST or not described}


def _where_they_are(folder: Path) -> str:
    above = Path(os.path.normpath(folder.absolute())).parent
    if (above / MANIFEST).is_file():
        return f"name {above}, whose checksums are those of this folder too"
    return "name the folder that slipway export delivered or slipway pull wrote, or an artifact's digest (sha256:…)"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
