"""Content-addressed artifacts: folders stored as one blob per file and a manifest that names them."""

from slipway.artifacts.digests import digest_file, parse_digest
from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import Manifest, ManifestFile
from slipway.artifacts.store import ActionResult, Artifacts, ArtifactStore, action_key

__all__ = [
    "ActionResult",
    "ArtifactStore",
    "Artifacts",
    "LocalStore",
    "Manifest",
    "ManifestFile",
    "action_key",
    "digest_file",
    "parse_digest",
]
