"""Write an artifact into a user's folder: completely, with its checksums, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from slipway.artifacts.store import Artifacts, OnBytes
from slipway.errors import ArtifactError
from slipway.files.checksums import MANIFEST, write_checksums
from slipway.folders.work_folders import unfinished


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
