"""Write a package, with the same bytes for the same model."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import coremltools as ct

MANIFEST, SPEC = "Manifest.json", Path("Data", "com.apple.CoreML", "model.mlmodel")
_HANDLES = "executorch_debug_handle_mapping.json"
"""A file for debuggers that no one has asked for, outside the manifest."""
_DATE = "com.github.apple.coremltools.conversion_date"


def write_package(model: Any, package: Path) -> None:
    """Write a converted model, without the day on which it was made and with names of files that are no chance."""
    metadata = model.user_defined_metadata
    if _DATE in metadata:
        del metadata[_DATE]
    model.save(str(package))
    (package / _HANDLES).unlink(missing_ok=True)
    spec = package / SPEC
    # The library writes maps in the order of this process.
    spec.write_bytes(ct.utils.load_spec(str(package)).SerializeToString(deterministic=True))
    manifest = package / MANIFEST
    read = json.loads(manifest.read_text(encoding="utf-8"))
    entries = read["itemInfoEntries"]
    names = {key: str(uuid.uuid5(uuid.NAMESPACE_URL, entry["path"])).upper() for key, entry in entries.items()}
    read["itemInfoEntries"] = {
        names[key]: entry for key, entry in sorted(entries.items(), key=lambda pair: names[pair[0]])
    }
    read["rootModelIdentifier"] = names[read["rootModelIdentifier"]]
    manifest.write_text(json.dumps(read, indent=4) + "\n", encoding="utf-8")
