"""An artifact as somebody's folder: whole, or not there."""

from __future__ import annotations

import os
from pathlib import Path

from slipway.artifacts.store import Artifacts, OnBytes
from slipway.errors import ArtifactError
from slipway.unfinished import publish, unfinished


def pull(store: Artifacts, digest: str, folder: Path, *, on_bytes: OnBytes | None = None) -> Path:
    """Write an artifact's verified files into a new folder, all or none; answers the folder.

    Raises:
        ArtifactError: ``OUTPUT_EXISTS``, and as the store's ``fetch``.
    """
    if os.path.lexists(folder):
        raise ArtifactError(f"{folder} exists already", reason="OUTPUT_EXISTS", remedy="name a new folder")
    store.manifest(digest)  # before any folder is made
    with unfinished(folder) as scratch:
        publish(store.fetch(digest, scratch / "files", on_bytes=on_bytes), folder)
    return folder
