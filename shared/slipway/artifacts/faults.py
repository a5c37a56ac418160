"""What every artifact store says when something is missing, corrupt or full."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from slipway.errors import ArtifactError
from slipway.folders.disk_full import disk_full_is_typed

#: Reasons for which an artifact counts as not there.
ABSENT = frozenset({"ARTIFACT_NOT_FOUND", "ARTIFACT_CORRUPT", "ARTIFACT_INVALID"})


def not_found(digest: str) -> ArtifactError:
    """No such artifact, or not all of it."""
    return ArtifactError(
        f"artifact {digest} is not in the store, or not complete",
        reason="ARTIFACT_NOT_FOUND",
        remedy="check the digest and the store (SLIPWAY_STORE), or make the artifact again by the export it came from",
        about={"digest": digest},
    )


def corrupt(digest: str, what: str) -> ArtifactError:
    """Stored bytes that are not what was put there."""
    return ArtifactError(
        f"artifact {digest} is corrupt: the stored bytes of {what} do not have their digest; they were removed",
        reason="ARTIFACT_CORRUPT",
        remedy="run the export again to make it anew",
        about={"digest": digest, "path": what},
    )


def unreadable(path: str | Path, error: OSError) -> ArtifactError:
    """A file to be stored that the operating system does not give."""
    return ArtifactError(f"cannot read {path}: {error.strerror}", reason="FILE_ERROR", about={"file": path})


def open_source(opened: Callable[[Path], BinaryIO], path: Path) -> BinaryIO:
    """Open a file to be stored.

    Raises:
        ArtifactError: ``FILE_ERROR``, and what ``opened`` raises of its own.
    """
    try:
        return opened(path)
    except OSError as error:
        raise unreadable(path, error) from error


def changed(path: str | Path) -> ArtifactError:
    """A file that somebody wrote to while it was stored."""
    return ArtifactError(
        f"{path} changed while it was being stored",
        reason="FILE_ERROR",
        remedy="store it when nothing writes to it any more",
        about={"file": path},
    )


def disk_full(doing: str, what: str, *, at: Path) -> AbstractContextManager[None]:
    """Say of a full disk where it is and what was being done."""
    remedy = "free space there; slipway cache gc frees the store's"
    return disk_full_is_typed(ArtifactError, f"while {doing} {what}", at=at, remedy=remedy)
