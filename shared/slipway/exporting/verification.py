"""Compare the files of an output directory, a pulled artifact, or an artifact in a store with their checksums."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.artifacts import Artifacts
from slipway.errors import ArtifactError
from slipway.exporting.opening import artifacts_at
from slipway.files.checksums import verify_directory
from slipway.representation import preformatted, three_lines
from slipway.results.delivery import LINEAGE
from slipway.settings import Settings
from slipway.texts import counted


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """Files that are all as they were written; any other outcome is an error.

    Attributes:
        path: The folder, absolute; or the artifact's whole digest.
        files: Number of files that were compared.
    """

    path: str
    files: int

    def to_json(self) -> dict[str, Any]:
        """Return what ``slipway verify --json`` prints."""
        return {"path": self.path, "files": self.files, "success": True}

    def __repr__(self) -> str:
        return three_lines(
            "Verification: every checksum is right", f"{counted(self.files, 'file')} compared", self.path
        )

    def _repr_html_(self) -> str:
        return preformatted(repr(self))


def verify_path(path: str, make_settings: Callable[[], Settings]) -> Verification:
    """Compare the files of a folder, or of the artifact with a digest, with their checksums.

    Args:
        path: The folder or the digest.
        make_settings: Function that returns the settings of this machine; only called for a digest.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT`` with every file of a folder that differs, ``ARTIFACT_NOT_FOUND``; ``ARTIFACT_INVALID`` if
            a folder has no checksums.
    """
    if not path.startswith("sha256:"):
        return _verify_folder(path)
    settings = make_settings()
    with artifacts_at(settings.coordinator, settings) as store:
        return _verify_artifact(path, store, scratch=settings.scratch)


def _verify_artifact(digest: str, store: Artifacts, *, scratch: Path) -> Verification:
    """Fetch an artifact, which compares its files; best on the file system of the store, where that makes no second copy."""
    digest = whole_digest(digest, store.digests)
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=scratch) as folder:
        store.fetch(digest, Path(folder) / "artifact")
    return Verification(digest, len(store.manifest(digest).files))


def _verify_folder(path: str) -> Verification:
    count, faults = verify_directory(Path(path))
    if faults:
        delivered = (Path(path) / LINEAGE).is_file()
        remedy = (
            "deliver them again with the same slipway export command into another folder"
            if delivered
            else "pull the artifact again into another folder"
        )
        shown = "\n".join(f"  {fault}" for fault in faults)
        raise ArtifactError(
            f"{path}: {len(faults)} of {counted(count, 'file')} not as written:\n{shown}",
            reason="ARTIFACT_CORRUPT",
            remedy=remedy,
            about={"folder": path, "faults": json.dumps(faults)},
        )
    return Verification(str(Path(path).resolve()), count)


def whole_digest(text: str, digests: Callable[[], list[str]]) -> str:
    """Complete a shortened digest such as ``sha256:0123456789ab``; return any other text unchanged.

    Args:
        text: A digest with at least 12 of its 64 digits.
        digests: Function that returns all digests; only called for a shortened one.

    Raises:
        ArtifactError: ``ARTIFACT_NOT_FOUND`` if no digest, or more than one, begins with the text.
    """
    if re.fullmatch(r"sha256:[0-9a-f]{12,63}", text) is None:
        return text
    matches = [digest for digest in digests() if digest.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    raise ArtifactError(
        f"{len(matches)} artifacts begin with {text}" if matches else f"no artifact begins with {text}",
        reason="ARTIFACT_NOT_FOUND",
        remedy="give more of its digits: slipway get EXPORT --json shows all 64 for an export, slipway cache ls --json for the store",
        about={"digest": text},
    )
