"""The id of an embedded export: the same configuration, sources and tools give the same id, so the same command resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slipway.base_match import BaseMatch
from slipway.configuration import ExportConfiguration
from slipway.distribution.installed import own_version
from slipway.errors import ConfigurationError
from slipway.registry import load_stage, stage_names


def export_identity(
    configuration: ExportConfiguration, digests: Mapping[str, str], *, base_match: BaseMatch | None
) -> str:
    """Return a 20-character id for these sources, this configuration and the installed software.

    The verdict of the files on the base model is part of it: if that changes, the export is another one, with the same stored
    results. Log settings are not part of it. Library versions are, because another version may give other results.
    """
    document = {
        "configuration": configuration.model_dump(mode="json", exclude={"log"}),
        "sources": dict(sorted(digests.items())),
        "base_match": base_match.status.value if base_match else "",
        "software": {"slipway": own_version(), **_stages()},
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"e-{hashlib.sha256(canonical.encode()).hexdigest()[:18]}"


def _stages() -> dict[str, Any]:
    stages: dict[str, Any] = {}
    for name in stage_names():
        try:
            stage = load_stage(name)
        except ConfigurationError:  # its extra is not installed; an export that needs it reports that
            continue
        stages[name] = [stage.version, stage.library_versions(), [str(provider) for provider in stage.providers()]]
    return stages
