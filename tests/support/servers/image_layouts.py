"""Images and artifacts that another program has copied out of a registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipway.artifacts.digests import digest_bytes
from support.servers.registry_server import skopeo


class Layout:
    """What is at an address of a registry, as skopeo copies it into a folder.

    Attributes:
        manifest: The manifest.
        config: The document that the manifest names as its configuration.
    """

    def __init__(self, source: str, folder: Path, *more: str) -> None:
        """Copy it.

        Args:
            source: The address, as skopeo names it.
            folder: New folder.
            more: More words for skopeo.
        """
        folder.parent.mkdir(exist_ok=True)
        skopeo(*more, "copy", "--src-tls-verify=false", source, f"oci:{folder}:x")
        self._folder = folder
        index = json.loads((folder / "index.json").read_text())
        self.manifest: dict[str, Any] = json.loads(self.blob(index["manifests"][0]["digest"]))
        self.config: dict[str, Any] = json.loads(self.blob(self.manifest["config"]["digest"]))

    def blob(self, digest: str) -> bytes:
        """Return a blob, which has its digest."""
        data = (self._folder / "blobs" / digest.replace(":", "/")).read_bytes()
        assert digest_bytes(data) == digest
        return data
