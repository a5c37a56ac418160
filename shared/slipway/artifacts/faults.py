"""Errors that all artifact stores share: missing, corrupt_error, changed_error, disk full."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from slipway.errors import ArtifactError
from slipway.machine.shortages import translate_disk_full

#: Reasons that mean: the store does not have the artifact.
ABSENT = frozenset({"ARTIFACT_NOT_FOUND", "ARTIFACT_CORRUPT", "ARTIFACT_INVALID"})


def not_found_error(digest: str) -> ArtifactError:
    """Return the error for an artifact that is missing or incomplete."""
    return ArtifactError(
        f"artifact {digest} is not in the store, or not complete",
        reason="ARTIFACT_NOT_FOUND",
        remedy="check the digest and the store (SLIPWAY_STORE), or run the export that made the artifact again",
        about={"digest": digest},
    )


def corrupt_error(digest: str, what: str) -> ArtifactError:
    """Return the error for stored bytes that do not have their digest."""
    return ArtifactError(
        f"artifact {digest} is corrupt: the stored bytes of {what} do not have their digest; they were removed",
        reason="ARTIFACT_CORRUPT",
        remedy="run the export again to make the artifact again",
        about={"digest": digest, "path": what},
    )


def unreadable_error(path: str | Path, error: OSError) -> ArtifactError:
    """Return the error for a file to be stored that cannot be read."""
    return ArtifactError(f"cannot read {path}: {error.strerror}", reason="FILE_ERROR", about={"file": path})


def open_source(opened: Callable[[Path], BinaryIO], path: Path) -> BinaryIO:
    """Open a file to be stored.

    Raises:
        ArtifactError: ``FILE_ERROR``, and errors of ``opened``.
    """
    try:
        return opened(path)
    except OSError as error:
        raise unreadable_error(path, error) from error


def changed_error(path: str | Path) -> ArtifactError:
    """Return the error for a file that was written to while it was stored."""
    return ArtifactError(
        f"{path} changed while it was being stored",
        reason="FILE_ERROR",
        remedy="store it once no program writes to it any more",
        about={"file": path},
    )


def disk_full(doing: str, what: str, *, at: Path) -> AbstractContextManager[None]:
    """Translate a full disk within a block into an error that names the disk and the operation."""
    remedy = "free space there; slipway cache gc frees the store's"
    return translate_disk_full(ArtifactError, f"while {doing} {what}", at=at, remedy=remedy)
